// Which program serves: found without VS Code, so that tests need none.

import * as path from "node:path";

/** A program and what it is started with. */
export interface Command {
    readonly program: string;
    readonly args: readonly string[];
    /** The interpreter whose `pip` installs what is missing, where one is known. */
    readonly python?: string;
}

/** What finding looks at. */
export interface Surroundings {
    /** The setting `policylang.command`; empty where nothing is set. */
    readonly setting: string;
    /** The folders of the workspace, as paths. */
    readonly folders: readonly string[];
    /** The interpreter that the Python extension has chosen, where that extension runs. */
    readonly interpreter?: string;
    readonly searchPath: string;
    readonly windows: boolean;
    /** The user's folder, for `~`. */
    readonly home: string;
    /** Whether a file is there that can be started. */
    readonly startable: (file: string) => boolean;
}

const PYTHON = /^(python|pypy)[0-9.]*(\.exe)?$/i;

/** The first that is there of: the setting, the workspace's `.venv`, the chosen interpreter, the `PATH`.
 * A setting that names nothing is an error and not skipped: another policylang than the one named would answer. */
export function find(where: Surroundings): Command | undefined {
    if (where.setting !== "") {
        const named = where.setting.replace(/^~(?=[/\\]|$)/, where.home).replaceAll("${workspaceFolder}", where.folders[0] ?? "");
        const found = isBare(named) ? onPath(named, where) : absolute(named, where);
        return found === undefined ? undefined : commandOf(found, where);
    }
    for (const folder of where.folders) {
        const found = beside(path.join(folder, ".venv", bin(where)), "policylang", where);
        if (found !== undefined) return commandOf(found, where);
    }
    const chosen = where.interpreter !== undefined && where.startable(where.interpreter) ? where.interpreter : undefined;
    if (chosen !== undefined && beside(path.dirname(chosen), "policylang", where) !== undefined)
        return commandOf(chosen, where);
    // The chosen interpreter once more, last: it says itself that policylang is missing, and is where to install it.
    const found = onPath("policylang", where) ?? chosen;
    return found === undefined ? undefined : commandOf(found, where);
}

/** The server of a `policylang` command, or of a Python interpreter; `-P` keeps the working folder's modules out. */
function commandOf(program: string, where: Surroundings): Command {
    if (PYTHON.test(path.basename(program))) return { program, args: ["-P", "-m", "policylang", "lsp"], python: program };
    const python = beside(path.dirname(program), "python", where) ?? beside(path.dirname(program), "python3", where);
    return { program, args: ["lsp"], ...(python === undefined ? {} : { python }) };
}

/** What a terminal is given to install what is missing, in a checkout of policylang. */
export function install(python: string | undefined): string {
    const pip = python === undefined ? "pip" : `${quoted(python)} -m pip`;
    return `${pip} install ".[lsp]"`;
}

function quoted(program: string): string {
    return /^[\w./\\:~-]+$/.test(program) ? program : `"${program}"`;
}

function isBare(name: string): boolean {
    return !/[/\\]/.test(name);
}

function bin(where: Surroundings): string {
    return where.windows ? "Scripts" : "bin";
}

function absolute(named: string, where: Surroundings): string | undefined {
    const starts = path.isAbsolute(named) ? [""] : where.folders;
    for (const start of starts) {
        const found = spelled(path.join(start, named), where);
        if (found !== undefined) return found;
    }
    return undefined;
}

function onPath(name: string, where: Surroundings): string | undefined {
    for (const folder of where.searchPath.split(where.windows ? ";" : ":")) {
        const found = folder === "" ? undefined : beside(folder, name, where);
        if (found !== undefined) return found;
    }
    return undefined;
}

function beside(folder: string, name: string, where: Surroundings): string | undefined {
    return spelled(path.join(folder, name), where);
}

function spelled(file: string, where: Surroundings): string | undefined {
    const spellings = where.windows && !/\.exe$/i.test(file) ? [`${file}.exe`] : [file];
    return spellings.find(where.startable);
}
