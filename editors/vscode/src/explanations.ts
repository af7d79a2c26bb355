// What the server explains, shown as a preview of Markdown beside.

import * as vscode from "vscode";
import type { Server } from "./server";

const SCHEME = "policylang-explained";

export class Explanations implements vscode.TextDocumentContentProvider, vscode.Disposable {
    private readonly texts = new Map<string, string>();
    private readonly changed = new vscode.EventEmitter<vscode.Uri>();
    readonly onDidChange = this.changed.event;
    private readonly registered: vscode.Disposable;

    constructor(private readonly server: Server) {
        this.registered = vscode.workspace.registerTextDocumentContentProvider(SCHEME, this);
    }

    provideTextDocumentContent(uri: vscode.Uri): string {
        return this.texts.get(uri.toString()) ?? "";
    }

    async rule(uri: vscode.Uri, line: number): Promise<void> {
        await this.show(`line ${line + 1}`, await this.server.ask<string>("policylang.explainRule", uri.toString(), line));
    }

    async node(uri: vscode.Uri, node: string | undefined, line: number): Promise<void> {
        const named = node ?? (await this.chosen(uri, line));
        if (named !== undefined)
            await this.show(named, await this.server.ask<string>("policylang.explainNode", uri.toString(), named));
    }

    async code(code: string): Promise<void> {
        await this.show(code, await this.server.ask<string>("policylang.explainCode", code));
    }

    async code(code: string): Promise<void> {
        await this.show(code, await this.server.ask<string>("policylang.explainCode", code));
    }

    /** The code of what is wrong at the cursor, or one that is typed. */
    async codeAtCursor(): Promise<void> {
        const editor = vscode.window.activeTextEditor;
        const all = editor === undefined ? [] : vscode.languages.getDiagnostics(editor.document.uri);
        const here = all.filter((each) => editor !== undefined && each.range.intersection(editor.selection) !== undefined);
        const codes = [...new Set(here.map(codeOf).filter((code) => code !== undefined))];
        const title = "policylang: explain a diagnostic";
        const asked = async () => (await vscode.window.showInputBox({ title, prompt: "its code, as APL301" }))?.trim();
        const code = codes.length > 1 ? await vscode.window.showQuickPick(codes, { title }) : (codes[0] ?? (await asked()));
        if (code) await this.code(code.toUpperCase());
    }

    /** A node of the rule at the cursor, or any that is typed. */
    private async chosen(uri: vscode.Uri, line: number): Promise<string | undefined> {
        const nodes = await this.server.ask<string[]>("policylang.nodesOfRule", uri.toString(), line);
        if (nodes === null || nodes.length === 0)
            return vscode.window.showInputBox({ title: "policylang: explain a node", prompt: "the name of a node of the snapshot" });
        return vscode.window.showQuickPick(nodes, { title: `Which of the ${nodes.length} nodes that line ${line + 1} matches?` });
    }

    private async show(name: string, markdown: string | null): Promise<void> {
        if (!markdown) {
            const words = "policylang: there is nothing to explain: no rule or no such code, or no plan on a snapshot.";
            void vscode.window.showInformationMessage(words);
            return;
        }
        const uri = vscode.Uri.from({ scheme: SCHEME, path: `/${name.replaceAll("/", "_")}.md` });
        this.texts.set(uri.toString(), markdown);
        this.changed.fire(uri);
        await vscode.commands.executeCommand("markdown.showPreviewToSide", uri);
    }

    dispose(): void {
        this.registered.dispose();
        this.changed.dispose();
    }
}

function codeOf(diagnostic: vscode.Diagnostic): string | undefined {
    if (diagnostic.source !== "policylang") return undefined;
    const code = typeof diagnostic.code === "object" ? diagnostic.code.value : diagnostic.code;
    return code === undefined ? undefined : String(code);
}
