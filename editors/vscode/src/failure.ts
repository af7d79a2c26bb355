// What to say when the server does not start.

const MESSAGE = /^(policylang( \w+)?|error(\[\w+\])?): /;

/** The program's own words where it has some: the last message that it wrote, without its marks. */
export function saidBy(written: string): string {
    const lines = written.split(/\r?\n/).map((line) => line.trim()).filter((line) => line !== "");
    const message = lines.findLast((line) => MESSAGE.test(line)) ?? lines.at(-1) ?? "";
    return message.replace(MESSAGE, "");
}

/** A sentence about a server that ended before it answered. */
export function didNotStart(program: string, code: number | null, written: string): string {
    const said = saidBy(written);
    const how = code === null ? "was ended" : `ended with code ${code}`;
    return said === "" ? `policylang: the language server (${program}) ${how}.` : `policylang: ${said} (${program})`;
}

/** Times at which a server ended: it is started again, unless it ends again and again. */
export class Restarts {
    private readonly times: number[] = [];
    constructor(
        private readonly most = 4,
        private readonly within = 180_000,
    ) {}

    /** Whether to start it once more. */
    again(now: number): boolean {
        this.times.push(now);
        if (this.times.length <= this.most) return true;
        return now - (this.times.shift() ?? now) > this.within;
    }
}
