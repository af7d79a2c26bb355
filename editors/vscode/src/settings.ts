// The settings as the server takes them.

/** What the server is started with: fields of `ProjectSettings`, those that are set. */
export interface InitializationOptions {
    graph?: string;
    path?: string;
    device?: string;
}

/** The settings that the server reads; a change of one, or of the command, starts it anew. */
export const SERVED = ["graph", "path", "device"] as const;

/** `read` gives the value of a setting below `policylang`. What is empty is left to the project's file. */
export function initializationOptions(read: (name: string) => unknown): InitializationOptions {
    const options: InitializationOptions = {};
    for (const name of SERVED) {
        const value = read(name);
        if (typeof value === "string" && value.trim() !== "") options[name] = value.trim();
    }
    return options;
}
