// What VS Code calls: the server, the commands, and what is shown beside a policy.

import * as vscode from "vscode";
import { chooseSnapshot, SnapshotItem } from "./choosing";
import { Explanations } from "./explanations";
import { PlanPanels } from "./plan_panel";
import { LANGUAGE, Server } from "./server";

let server: Server | undefined;

export function activate(context: vscode.ExtensionContext): void {
    const made = new Server();
    server = made;
    const panels = new PlanPanels(made);
    const explanations = new Explanations(made);
    const commands: Record<string, (...args: never[]) => unknown> = {
        "policylang.chooseSnapshot": chooseSnapshot,
        "policylang.restart": () => made.restart(),
        "policylang.output": () => made.output.show(),
        // Code actions of the server name these with a document and what is meant in it; the palette names nothing.
        "policylang.showPlan": (document?: Named) => about(document, (uri) => panels.show(uri)),
        "policylang.explainRule": (document?: Named, line?: number) =>
            about(document, (uri, at) => explanations.rule(uri, line ?? at)),
        "policylang.explainNode": (document?: Named, node?: string | null, line?: number) =>
            about(document, (uri, at) => explanations.node(uri, typeof node === "string" ? node : undefined, line ?? at)),
        "policylang.explainCode": (code?: string) =>
            typeof code === "string" ? explanations.code(code) : explanations.codeAtCursor(),
    };
    context.subscriptions.push(
        made,
        panels,
        explanations,
        new SnapshotItem(made),
        ...Object.entries(commands).map(([name, does]) => vscode.commands.registerCommand(name, does)),
        vscode.workspace.onDidOpenTextDocument((document) => void made.serve(document)),
        vscode.workspace.onDidGrantWorkspaceTrust(() => void made.restart()),
        vscode.workspace.onDidChangeConfiguration((change) => {
            // the server asks for the others itself
            if (change.affectsConfiguration(`${LANGUAGE}.command`)) void made.restart();
        }),
    );
    vscode.workspace.textDocuments.forEach((document) => void made.serve(document));
}

export async function deactivate(): Promise<void> {
    await server?.stop();
}

type Named = string | vscode.Uri;

/** Does something with the document that is named, or with the policy in the active editor and its line. */
async function about(named: Named | undefined, does: (uri: vscode.Uri, line: number) => Promise<void>): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    const line = editor?.selection.active.line ?? 0;
    try {
        if (typeof named === "string") await does(vscode.Uri.parse(named), line);
        else if (editor?.document.languageId === LANGUAGE) await does(editor.document.uri, line);
        else if (named !== undefined) await does(named, line);
        else void vscode.window.showInformationMessage("policylang: open a policy (.apl) first.");
    } catch (error) {
        void vscode.window.showErrorMessage(`policylang: ${error instanceof Error ? error.message : String(error)}`);
    }
}
