// Drives the packaged extension in a real VS Code that runs as a server (code-server), in a headless Chromium, against a
// real `policylang lsp` on a real snapshot. Not a part of CI: it wants code-server, which is built on installation.
//
//   ../../scripts/editors                     the .vsix
//   npm install --no-save playwright-core     drives the browser
//   CODE_SERVER=…/code-server npm run test:browser -- [--screenshot ../../docs/editor.png] [--keep FOLDER]
//
// CODE_SERVER is its command or its out/node/entry.js, CHROMIUM the browser (chromium), POLICYLANG the command or the
// interpreter that serves (the checkout's .venv). It was last seen with code-server 4.100.3, which is VS Code 1.100 and
// runs on node 20. --keep leaves a picture of each step in a folder.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { copyFileSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import path from "node:path";
import { parseArgs } from "node:util";

const ROOT = path.resolve(import.meta.dirname ?? path.dirname(new URL(import.meta.url).pathname), "../../..");
const { values: options } = parseArgs({ options: { screenshot: { type: "string" }, keep: { type: "string" } } });

const chromium = await driver();
const server = onPath(process.env.CODE_SERVER ?? "code-server");
const browserFile = onPath(process.env.CHROMIUM ?? "chromium");
const policylang = process.env.POLICYLANG ?? path.join(ROOT, ".venv/bin/python");
const version = JSON.parse(readFileSync(path.join(ROOT, "editors/vscode/package.json"), "utf8")).version;
const vsix = path.join(ROOT, `build/policylang-${version}.vsix`);
const missing = [
    [chromium, "playwright-core (npm install --no-save playwright-core)"],
    [server, "code-server (CODE_SERVER)"],
    [browserFile, "Chromium (CHROMIUM)"],
    [existsSync(policylang), "a policylang that serves (POLICYLANG)"],
    [existsSync(vsix), "the extension (scripts/editors makes it)"],
].filter(([there]) => !there);
if (missing.length > 0) {
    console.log(`skipped: not here: ${missing.map(([, name]) => name).join(", ")}`);
    process.exit(0);
}

const POLICY = `policy llama3_mine

blocks layers.*

let projection = mm, addmm

recompute everything in block
save attention in block
save first 2 projection per block
save everything in block where crosses block
save topk in block

expect saved <= 12 GiB
`;
const DEAD = "save topk in block";

const home = mkdtempSync(path.join(tmpdir(), "policylang-editor-"));
const folder = path.join(home, "training");
const started = [];
function prepare() {
    mkdirSync(path.join(folder, "policies"), { recursive: true });
    mkdirSync(path.join(home, "data/User"), { recursive: true });
    writeFileSync(path.join(folder, "policies/mine.apl"), POLICY);
    writeFileSync(path.join(folder, "pyproject.toml"), '[tool.policylang]\ngraph = "llama3_8b.graph"\n');
    writeFileSync(path.join(folder, "package.json"), "{}"); // no snapshot, and not offered as one
    copyFileSync(path.join(ROOT, "docs/graphs/llama3_8b.graph"), path.join(folder, "llama3_8b.graph"));
    copyFileSync(path.join(ROOT, "docs/graphs/gpt2.graph"), path.join(folder, "gpt2.graph"));
    const settings = {
        "policylang.command": policylang,
        "security.workspace.trust.enabled": false,
        "workbench.colorTheme": "Default Light Modern",
        "workbench.startupEditor": "none",
        "workbench.tips.enabled": false,
        "workbench.secondarySideBar.defaultVisibility": "hidden",
        "chat.commandCenter.enabled": false,
        "editor.minimap.enabled": false,
        "editor.fontSize": 12,
        "telemetry.telemetryLevel": "off",
    };
    writeFileSync(path.join(home, "data/User/settings.json"), JSON.stringify(settings));
    writeFileSync(path.join(home, "config.yaml"), "");
}

function codeServer(...args) {
    const shared = ["--config", path.join(home, "config.yaml"), "--user-data-dir", path.join(home, "data")];
    const all = [...shared, "--extensions-dir", path.join(home, "extensions"), ...args];
    return /\.[cm]?js$/.test(server) ? [process.execPath, [server, ...all]] : [server, all];
}

async function drive() {
    execFileSync(...codeServer("--install-extension", vsix), { stdio: "ignore" });
    console.log(`installed ${path.basename(vsix)}`);
    const port = await freePort();
    const off = ["--auth", "none", "--disable-telemetry", "--disable-update-check"];
    const [program, args] = codeServer(...off, "--bind-addr", `127.0.0.1:${port}`, folder);
    const serving = spawn(program, args, { stdio: "ignore", env: { ...process.env, PYTHONPATH: ROOT }, detached: true });
    started.push(() => process.kill(-serving.pid));
    const browser = await chromium.launch({ executablePath: browserFile, args: ["--no-sandbox"] });
    started.push(() => browser.close());
    const page = await browser.newPage({ viewport: { width: 1400, height: 760 } });
    const uri = `http://127.0.0.1:${port}/?folder=${folder}`;
    await until("the editor answers", async () => (await fetch(uri).catch(() => undefined))?.ok);
    await page.goto(uri);
    await page.waitForSelector(".monaco-workbench .part.statusbar", { timeout: 60_000 });
    page.setDefaultTimeout(15_000);
    const see = new Seen(page);
    await see.opens("mine.apl");

    await see.step("the language is policylang", () => page.waitForSelector('.statusbar-item:has-text("policylang")'));
    await see.step("the status bar names the snapshot of pyproject.toml", () =>
        page.waitForSelector('.statusbar-item:has-text("llama3_8b")', { timeout: 30_000 }),
    );
    await see.step("a rule that matches nothing in the snapshot is underlined", () => page.waitForSelector(".squiggly-error"));
    await see.step("rules have figures at their ends", async () => {
        await until("hints", async () => /\d+ value|\d[\d.]* [GM]iB/.test(await see.line("save attention in block")));
        console.log(`     ${await see.line("save attention in block")}`);
    });
    await see.step("hovering a rule says what it matches", async () => {
        await see.cursor("save attention in block", 7);
        await page.keyboard.press("Control+K"); // a click would move the mouse, and a hover goes by it
        await page.keyboard.press("Control+I");
        const hover = await page.waitForSelector(".monaco-hover .monaco-hover-content:has-text('attention')");
        console.log(`     ${(await hover.innerText()).split("\n").slice(0, 4).join(" · ")}`);
        await page.keyboard.press("Escape");
        await page.keyboard.press("Escape");
    });
    await see.step("the definition of a name is its `let`", async () => {
        await see.cursor("save first 2 projection per block", 15);
        await page.keyboard.press("F12");
        await page.waitForSelector('.statusbar-item:has-text("Ln 5")');
    });
    await see.step("completion offers what the grammar and the graph have", async () => {
        await see.cursor("expect saved <= 12 GiB", 23);
        await page.keyboard.type("\nsave att");
        await page.keyboard.press("Control+Space");
        try {
            const row = await page.waitForSelector(".suggest-widget.visible .monaco-list-row:has-text('attention')");
            console.log(`     ${(await row.innerText()).replace(/\s+/g, " ")}`);
        } finally {
            await page.keyboard.press("Escape");
            for (let typed = 0; typed < 9; typed++) await page.keyboard.press("Backspace");
        }
    });
    await see.step("the page of the plan stands beside, and its scripts run", async () => {
        await see.command("policylang: show this plan");
        const frame = await see.webview("#memory");
        await until("the chart", async () => (await frame.$("#memory svg")) !== null);
        await until("the values, which a script draws", async () => (await frame.$$("#list [role=option]")).length > 3);
        console.log(`     ${(await (await frame.$("#subtitle")).innerText()).trim()}`);
    });
    if (options.screenshot) {
        await page.keyboard.press("Control+B"); // the files go, the policy has their place
        await page.click(".view-line:has-text('topk')");
        await see.cursor(DEAD, 8);
        await page.waitForTimeout(1500);
        await see.picture(options.screenshot);
        console.log(`screenshot: ${options.screenshot}`);
    }
    await see.step("the quick fix writes `optional`, and the error goes", async () => {
        await page.click(".view-line:has-text('topk')");
        await see.cursor(DEAD, 8);
        await page.keyboard.press("Control+.");
        const fix = await page.waitForSelector(".action-widget .monaco-list-row:has-text('optional')");
        console.log(`     ${(await fix.innerText()).trim()}`);
        await page.keyboard.press("ArrowDown");
        await page.keyboard.press("ArrowUp");
        await page.keyboard.press("Enter");
        await until("the text changed", async () => (await see.line("topk in block")).includes("optional save topk"));
        await until("no error", async () => (await page.$(".squiggly-error")) === null);
    });
    await see.step("a change of the policy changes the page", async () => {
        const tiles = async () => {
            try {
                return await (await see.webview("#tiles")).innerText("#tiles", { timeout: 1000 });
            } catch {
                return undefined; // the frame is being replaced
            }
        };
        const before = await tiles();
        await page.click(".view-line:has-text('save attention')");
        await see.cursor("save attention in block", 24);
        await page.keyboard.type("\nsave matmul in block");
        await page.keyboard.press("Escape");
        let now;
        await until("other figures", async () => (now = await tiles()) !== undefined && now !== before);
        for (const each of [before, now]) console.log(`     ${each.replace(/\s+/g, " ").slice(0, 90)}`);
    });
    await see.step("a rule is explained as Markdown", async () => {
        await see.cursor("save attention in block", 7);
        await see.command("policylang: explain this rule");
        await see.preview("save attention in block");
    });
    await see.step("a node is chosen among those of the rule, and explained", async () => {
        await page.click(".view-line:has-text('save attention')");
        await see.cursor("save attention in block", 7);
        await see.command("policylang: explain a node of this rule");
        const rows = await page.waitForSelector(".quick-input-widget .monaco-list-row:has-text('attention')");
        const node = (await rows.innerText()).trim();
        await page.keyboard.press("Enter");
        await page.waitForSelector(`.tab:has-text("Preview ${node}.md")`);
        await see.preview(node);
    });
    await see.step("a diagnostic is explained by the page of its code", async () => {
        await page.click(".view-line:has-text('topk')");
        await see.cursor("optional save topk", 1);
        await page.keyboard.type("x ");
        await page.waitForSelector(".squiggly-error");
        await see.command("policylang: explain a diagnostic");
        await see.preview("APL012: not a statement");
        await page.click(".view-line:has-text('topk')");
        await see.cursor("x optional", 3);
        for (let typed = 0; typed < 2; typed++) await page.keyboard.press("Backspace");
    });
    await see.step("a server that is killed is started again, and knows what is open", async () => {
        const before = serversOf(serving.pid);
        assert.equal(before.length, 1, `servers: ${before.join(", ")}`);
        process.kill(before[0], "SIGKILL");
        await until("another server", () => serversOf(serving.pid).some((each) => each !== before[0]));
        await page.click(".view-line:has-text('save attention')");
        await see.cursor("save attention in block", 6);
        await page.keyboard.type("n");
        await page.waitForSelector(".squiggly-error");
        await page.keyboard.press("Backspace");
    });
    await see.step("another snapshot is chosen, written to the settings, and planned on", async () => {
        await page.click(".view-line:has-text('save attention')");
        await page.click('.statusbar-item:has-text("llama3_8b")');
        await page.waitForSelector(".quick-input-widget .monaco-list-row:has-text('gpt2')");
        const rows = await page.$$eval(".quick-input-widget .monaco-list-row", (found) => found.map((row) => row.innerText));
        assert.ok(!rows.some((row) => row.includes("package")), rows.join(", "));
        await page.keyboard.type("gpt2");
        await page.keyboard.press("Enter");
        await page.waitForSelector('.statusbar-item:has-text("gpt2")', { timeout: 20_000 });
        const written = readFileSync(path.join(folder, ".vscode/settings.json"), "utf8");
        assert.equal(JSON.parse(written)["policylang.graph"], "gpt2.graph");
        await page.waitForSelector(".squiggly-error"); // its blocks are called otherwise
    });
    await see.step("where no server is found, the message says what installs it", async () => {
        writeFileSync(path.join(folder, ".vscode/settings.json"), JSON.stringify({ "policylang.command": "/nowhere/policylang" }));
        const said = await page.waitForSelector(".notification-toast:has-text('/nowhere/policylang')");
        const words = (await said.innerText()).replace(/\s+/g, " ");
        assert.match(words, /pip install "\.\[lsp\]"/);
        console.log(`     ${words}`);
    });
    await see.step("a server that cannot start says why in its own words", async () => {
        const bare = path.join(home, "bare");
        execFileSync("python3", ["-m", "venv", "--without-pip", bare]);
        const command = path.join(bare, "bin/python");
        writeFileSync(path.join(folder, ".vscode/settings.json"), JSON.stringify({ "policylang.command": command }));
        const said = await page.waitForSelector(".notification-toast:has-text('No module named')");
        const words = (await said.innerText()).replace(/\s+/g, " ");
        assert.ok(words.includes(`${command} -m pip install ".[lsp]"`), words);
        console.log(`     ${words}`);
    });
    await see.step("each folder of a workspace has its own snapshot", async () => {
        writeFileSync(path.join(folder, ".vscode/settings.json"), "{}");
        const other = path.join(home, "other");
        mkdirSync(other);
        writeFileSync(path.join(other, "small.apl"), "save attention\n");
        writeFileSync(path.join(other, "pyproject.toml"), '[tool.policylang]\ngraph = "../training/gpt2.graph"\n');
        const both = path.join(home, "both.code-workspace");
        writeFileSync(both, JSON.stringify({ folders: [{ path: "training" }, { path: "other" }], settings: {} }));
        const folders = ".explorer-folders-view .monaco-list-row:has-text('other')";
        await until("the folders, which code-server does not always find at first", async () => {
            await page.goto(`http://127.0.0.1:${port}/?workspace=${both}`);
            return page.waitForSelector(folders, { timeout: 8000 }).catch(() => false);
        }, 60_000);
        await see.opens("mine.apl");
        await page.waitForSelector('.statusbar-item:has-text("llama3_8b")');
        await see.opens("small.apl");
        await page.waitForSelector('.statusbar-item:has-text("gpt2")');
        await until("its hint", async () => (await see.line("save attention")).includes("12 values"));
        assert.equal(serversOf(serving.pid).length, 1);
    });
    await see.step("in a workspace that is not trusted nothing is started", async () => {
        writeFileSync(path.join(folder, ".vscode/settings.json"), "{}");
        const user = path.join(home, "data/User/settings.json");
        const settings = JSON.parse(readFileSync(user, "utf8"));
        const untrusted = { "security.workspace.trust.enabled": true, "security.workspace.trust.startupPrompt": "never" };
        writeFileSync(user, JSON.stringify({ ...settings, ...untrusted }));
        await page.goto(uri);
        await page.waitForSelector('.statusbar-item:has-text("Restricted Mode")');
        await page.waitForSelector('.statusbar-item:has-text("policylang")');
        await page.waitForTimeout(4000);
        assert.equal(await page.$(".squiggly-error"), null);
        assert.equal(await page.$(".notification-toast:has-text('policylang')"), null);
    });
    console.log(see.missed === 0 ? "all seen" : `${see.missed} not seen`);
    process.exitCode = see.missed === 0 ? 0 : 1;
}

/** What is done with the workbench, as a user would. */
class Seen {
    constructor(page) {
        this.page = page;
        this.number = 0;
        this.missed = 0;
    }

    async step(name, does) {
        try {
            await does();
            console.log(`seen ${name}`);
        } catch (error) {
            this.missed += 1;
            console.log(`NOT SEEN ${name}: ${String(error.message).split("\n")[0]}`);
            await this.page.keyboard.press("Escape");
        } finally {
            if (options.keep) await this.picture(path.join(options.keep, `${String(++this.number).padStart(2, "0")}.png`));
        }
    }

    async picture(file) {
        mkdirSync(path.dirname(path.resolve(file)), { recursive: true });
        await this.page.screenshot({ path: file });
    }

    async opens(name) {
        await this.page.keyboard.press("Control+P");
        await this.page.waitForSelector(".quick-input-widget input");
        await this.page.keyboard.type(name);
        await this.page.waitForSelector(`.quick-input-widget .monaco-list-row:has-text('${name}')`);
        await this.page.keyboard.press("Enter");
        await this.page.waitForSelector(".view-lines .view-line");
    }

    async command(title) {
        await this.page.keyboard.press("F1");
        await this.page.waitForSelector(".quick-input-widget input");
        await this.page.keyboard.type(title);
        await this.page.click(`.quick-input-widget .monaco-list-row[aria-label^="${title}"]`);
    }

    /** The text of the line that has these words, hints and all. */
    async line(words) {
        const lines = await this.page.$$eval(".view-lines .view-line", (found) => found.map((each) => each.innerText));
        return lines.map((each) => each.replaceAll("\u00a0", " ")).find((each) => each.includes(words)) ?? "";
    }

    /** Puts the cursor into the policy's text, at a column counted from 1. */
    async cursor(words, column) {
        const text = await this.policyText();
        const line = text.findIndex((each) => each.includes(words)) + 1;
        assert.ok(line > 0, `no line has \`${words}\`: ${text.join("|")}`);
        await this.page.keyboard.press("Control+G");
        await this.page.waitForSelector(".quick-input-widget input");
        await this.page.keyboard.type(`${line}:${column}`);
        await this.page.keyboard.press("Enter");
        await this.page.waitForSelector(`.statusbar-item:has-text("Ln ${line}, Col ${column}")`);
    }

    async policyText() {
        const tops = await this.page.$$eval(".editor-instance .view-lines .view-line", (found) =>
            found.map((each) => [Number.parseInt(each.style.top, 10), each.innerText.replaceAll("\u00a0", " ")]),
        );
        return tops.sort(([one], [other]) => one - other).map(([, text]) => text);
    }

    /** A preview of Markdown that has these words. */
    async preview(words) {
        let text = "";
        await until(`a preview with ${words}`, async () => {
            const frame = await this.webview(".markdown-body");
            text = await frame.innerText(".markdown-body", { timeout: 1000 }).catch(() => "");
            return text.includes(words);
        });
        console.log(`     ${text.trim().split(/\n+/).slice(0, 3).join(" · ")}`);
    }

    /** The frame of a panel that has what a selector names. */
    async webview(selector) {
        let found;
        await until(`a panel with ${selector}`, async () => {
            for (const frame of this.page.frames()) {
                if (await frame.$(selector).catch(() => null)) found = frame;
            }
            return found !== undefined;
        });
        return found;
    }
}

/** The language servers below a process. */
function serversOf(root) {
    const listed = execFileSync("ps", ["-eo", "pid=,ppid=,args="], { encoding: "utf8" }).trim().split("\n");
    const all = listed.map((line) => /^\s*(\d+)\s+(\d+)\s+(.*)$/.exec(line)).filter(Boolean);
    const parents = new Map(all.map(([, pid, parent]) => [Number(pid), Number(parent)]));
    const below = (pid) => pid === root || (parents.has(pid) && below(parents.get(pid)));
    return all.filter(([, pid, , args]) => /policylang lsp/.test(args) && below(Number(pid))).map(([, pid]) => Number(pid));
}

async function until(what, holds, milliseconds = 15_000) {
    const end = Date.now() + milliseconds;
    while (!(await holds())) {
        if (Date.now() > end) throw new Error(`not seen within ${milliseconds / 1000} s: ${what}`);
        await new Promise((done) => setTimeout(done, 150));
    }
}

async function driver() {
    const from = process.env.PLAYWRIGHT_CORE ?? "playwright-core";
    try {
        return (await import(from)).default.chromium;
    } catch {
        return undefined;
    }
}

function onPath(name) {
    if (name.includes("/")) return existsSync(name) ? path.resolve(name) : undefined;
    const folders = (process.env.PATH ?? "").split(":").filter(existsSync);
    return folders.map((each) => path.join(each, name)).find((file) => existsSync(file));
}

async function freePort() {
    const probe = createServer();
    await new Promise((done) => probe.listen(0, "127.0.0.1", done));
    const { port } = probe.address();
    await new Promise((done) => probe.close(done));
    return port;
}

try {
    prepare();
    await drive();
} finally {
    for (const each of started.reverse()) await each();
    rmSync(home, { recursive: true, force: true });
}
