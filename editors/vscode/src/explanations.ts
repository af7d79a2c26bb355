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

    /** The code of what is wrong at the cursor, else on its line, else one that is typed. */
    async codeAtCursor(): Promise<void> {
        const title = "policylang: explain a diagnostic";
        const codes = codesAtCursor();
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

function codesAtCursor(): string[] {
    const editor = vscode.window.activeTextEditor;
    if (editor === undefined) return [];
    const all = vscode.languages.getDiagnostics(editor.document.uri).filter((each) => each.source === "policylang");
    const line = editor.document.lineAt(editor.selection.active.line).range;
    const at = (place: vscode.Range) => all.filter((each) => each.range.intersection(place) !== undefined);
    const here = at(editor.selection);
    return [...new Set((here.length > 0 ? here : at(line)).map(codeOf).filter((code) => code !== undefined))];
}

function codeOf({ code }: vscode.Diagnostic): string | undefined {
    const value = typeof code === "object" ? code.value : code;
    return value === undefined ? undefined : String(value);
}
