// The settings as the server takes them.

/** What the server reads of the section `policylang`. The others are ours. */
export const SERVED = ["graph", "path", "device", "pause"] as const;

/** A section as the server asked for it: what is empty is not said, so that the project's file says it. */
export function asServed(section: unknown): unknown {
    if (typeof section !== "object" || section === null) return section;
    const entries = Object.entries(section).filter(([name]) => (SERVED as readonly string[]).includes(name));
    const said = entries.map(([name, value]): [string, unknown] => [name, typeof value === "string" ? value.trim() : value]);
    return Object.fromEntries(said.filter(([, value]) => value !== "" && value !== null));
}
