// Which files may be snapshots, and how a setting names one.

import * as path from "node:path";

/** What is looked for in a workspace. */
export const PATTERN = "**/*.{graph,json,json.gz}";
export const LEFT_OUT = "**/{node_modules,.venv,.git,site-packages,__pycache__}/**";

const FIRST_BYTES: readonly (readonly number[])[] = [
    [0x8a, 0x41, 0x50, 0x4c, 0x47], // a snapshot
    [0x1f, 0x8b], // a recorded graph, packed
];

/** Whether a file may be a graph, by its name and its first bytes; of a JSON file, whether it says what a recorded
 * graph says. */
export function mayBeGraph(name: string, head: Uint8Array): boolean {
    if (FIRST_BYTES.some((bytes) => bytes.every((byte, index) => head[index] === byte))) return true;
    const text = new TextDecoder().decode(head);
    if (name.endsWith(".json")) return /^\s*\{/.test(text) && /"(fields|nodes)"\s*:/.test(text);
    return name.endsWith(".graph") && /^[ \t]*%\w+[ \t]*=/m.test(text);
}

/** As a setting names it: relative where it lies in the folder, so that the setting can be shared. */
export function asSetting(file: string, folder: string | undefined): string {
    if (folder === undefined) return file;
    const relative = path.relative(folder, file);
    return relative === "" || relative.startsWith("..") || path.isAbsolute(relative) ? file : relative.split(path.sep).join("/");
}

/** As the status bar names it. */
export function shortName(graph: string): string {
    return path.basename(graph).replace(/\.(graph|json|json\.gz)$/, "");
}
