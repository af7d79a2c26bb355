// The page of a plan beside its policy, made anew when the policy changes.

import { randomBytes } from "node:crypto";
import { readFile } from "node:fs/promises";
import * as path from "node:path";
import * as vscode from "vscode";
import { panelPage, wordsPage } from "./page";
import { LANGUAGE, type Server } from "./server";

/** Milliseconds without a change after which the page is asked for again; the server plans before it answers. */
const PAUSE = 400;

const NO_PLAN = "There is no plan to show: the policy has errors, or no snapshot is chosen.";
const NO_TRUST = "There is no plan to show: the workspace is not trusted, and no server is started in it.";

export class PlanPanels implements vscode.Disposable {
    private readonly panels = new Map<string, PlanPanel>();
    private readonly listening: vscode.Disposable[];

    constructor(private readonly server: Server) {
        this.listening = [
            vscode.workspace.onDidChangeTextDocument(({ document }) => {
                // a change of an included file is a change of what includes it
                if (document.languageId === LANGUAGE) for (const panel of this.panels.values()) panel.later();
            }),
            server.onDidPublish(() => this.panels.forEach((panel) => panel.later())), // of another snapshot too
            vscode.window.onDidChangeActiveColorTheme(() => this.panels.forEach((panel) => panel.draw())),
        ];
    }

    async show(uri: vscode.Uri): Promise<void> {
        const key = uri.toString();
        let panel = this.panels.get(key);
        if (panel === undefined) {
            panel = new PlanPanel(uri, this.server, () => this.panels.delete(key));
            this.panels.set(key, panel);
        }
        await panel.show();
    }

    dispose(): void {
        this.listening.forEach((each) => each.dispose());
        [...this.panels.values()].forEach((panel) => panel.dispose());
    }
}

class PlanPanel {
    private readonly panel: vscode.WebviewPanel;
    private html: string | undefined;
    private timer: NodeJS.Timeout | undefined;
    private asked = 0;

    constructor(
        private readonly uri: vscode.Uri,
        private readonly server: Server,
        gone: () => void,
    ) {
        const beside = { viewColumn: vscode.ViewColumn.Beside, preserveFocus: true };
        this.panel = vscode.window.createWebviewPanel("policylang.plan", this.title(), beside, {
            enableScripts: true,
            enableFindWidget: true,
            enableCommandUris: false,
            localResourceRoots: [],
        });
        this.panel.onDidDispose(() => {
            clearTimeout(this.timer);
            this.asked = -1;
            gone();
        });
    }

    private title(): string {
        return `Plan of ${path.basename(this.uri.path)}`;
    }

    async show(): Promise<void> {
        this.panel.reveal(undefined, true);
        await this.refresh();
    }

    later(): void {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => void this.refresh(), PAUSE);
    }

    private async refresh(): Promise<void> {
        const number = ++this.asked;
        const html = await this.page();
        if (number !== this.asked) return; // a later one is under way, or the panel is closed
        // a policy that is being written has errors in between: what was there stays, and the title says so
        this.panel.title = html === undefined && this.html !== undefined ? `${this.title()} (before the last change)` : this.title();
        if (html === this.html && html !== undefined) return;
        this.html = html ?? this.html;
        this.draw();
    }

    private async page(): Promise<string | undefined> {
        try {
            const found = await this.server.ask<{ uri: string }>("policylang.showPlan", this.uri.toString());
            return found === null ? undefined : await readFile(vscode.Uri.parse(found.uri).fsPath, "utf8");
        } catch (error) {
            this.server.output.appendLine(`no plan of ${this.uri.toString()}: ${String(error)}`);
            return undefined;
        }
    }

    draw(): void {
        const { kind } = vscode.window.activeColorTheme;
        const dark = kind === vscode.ColorThemeKind.Dark || kind === vscode.ColorThemeKind.HighContrast;
        const nonce = randomBytes(16).toString("hex");
        this.panel.webview.html = this.html === undefined ? wordsPage(vscode.workspace.isTrusted ? NO_PLAN : NO_TRUST) : panelPage(this.html, nonce, dark);
    }

    dispose(): void {
        this.panel.dispose();
    }
}
