// The snapshot that policies are planned on: which it is, and another.

import { open } from "node:fs/promises";
import * as vscode from "vscode";
import { LANGUAGE, type Server } from "./server";
import { asSetting, LEFT_OUT, mayBeGraph, PATTERN, shortName } from "./snapshots";

const HEAD = 4096;
const MOST = 500;
const PAUSE = 200;

/** What holds for a document: the server's own answer, since it reads the project's file too. */
interface InUse {
    readonly graph: string | null;
    readonly path: string | null;
    readonly device: string | null;
}

/** Names the snapshot while a policy is in the active editor. */
export class SnapshotItem implements vscode.Disposable {
    private readonly item = vscode.window.createStatusBarItem("policylang.snapshot", vscode.StatusBarAlignment.Right, 100);
    private readonly listening: vscode.Disposable[];
    private timer: NodeJS.Timeout | undefined;

    constructor(private readonly server: Server) {
        this.item.name = "policylang: snapshot";
        this.item.command = "policylang.chooseSnapshot";
        this.listening = [
            vscode.window.onDidChangeActiveTextEditor(() => void this.refresh()),
            server.onDidPublish(() => this.later()),
        ];
        void this.refresh();
    }

    private later(): void {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => void this.refresh(), PAUSE);
    }

    private async refresh(): Promise<void> {
        const document = vscode.window.activeTextEditor?.document;
        if (document?.languageId !== LANGUAGE) {
            this.item.hide();
            return;
        }
        const found = await inUse(this.server, document.uri);
        if (vscode.window.activeTextEditor?.document !== document) return; // another was opened meanwhile
        const graph = found?.graph ?? null;
        this.item.text = graph === null ? "$(circle-slash) no snapshot" : `$(graph) ${shortName(graph)}`;
        const lines = [graph ?? "No snapshot is chosen: policies are checked as text."];
        if (found?.path) lines.push(`path: ${found.path}`);
        if (found?.device) lines.push(`device: ${found.device}`);
        this.item.tooltip = [...lines, "Click to choose a snapshot."].join("\n");
        this.item.show();
    }

    dispose(): void {
        clearTimeout(this.timer);
        this.item.dispose();
        this.listening.forEach((each) => each.dispose());
    }
}

/** The server's own answer; the settings' where there is none. */
async function inUse(server: Server, uri: vscode.Uri): Promise<InUse | null> {
    const found = await server.ask<InUse>("policylang.settings", uri.toString()).catch(() => null);
    if (found !== null) return found;
    const settings = vscode.workspace.getConfiguration("policylang", uri);
    const set = (name: string) => settings.get<string>(name) || null;
    return { graph: set("graph"), path: set("path"), device: set("device") };
}

interface Choice extends vscode.QuickPickItem {
    readonly does: "file" | "look" | "project";
    readonly file?: vscode.Uri;
}

/** Asks which, and writes it into the settings of the folder; of the user where no folder is open. */
export async function chooseSnapshot(): Promise<void> {
    const folder = await folderOfEditor();
    const file = await chosenFile(folder);
    if (file === undefined) return;
    const value = file === null ? undefined : asSetting(file.fsPath, folder?.uri.fsPath);
    const settings = vscode.workspace.getConfiguration("policylang", folder?.uri);
    await settings.update("graph", value, folder === undefined ? vscode.ConfigurationTarget.Global : vscode.ConfigurationTarget.WorkspaceFolder);
}

/** Null where the project's file is to say it. */
async function chosenFile(folder: vscode.WorkspaceFolder | undefined): Promise<vscode.Uri | null | undefined> {
    const files = folder === undefined ? [] : await snapshots(folder);
    const choices: Choice[] = [
        ...files.map((file): Choice => ({
            does: "file",
            file,
            label: `$(graph) ${shortName(file.path)}`,
            description: vscode.workspace.asRelativePath(file, false),
        })),
        { does: "look", label: "$(folder-opened) Another file…" },
        { does: "project", label: "$(discard) None here", description: "that of [tool.policylang] in pyproject.toml, if it names one" },
    ];
    const chosen = await vscode.window.showQuickPick(choices, {
        title: "policylang: choose a snapshot",
        placeHolder: "The graph that policies are planned on while they are written",
        matchOnDescription: true,
    });
    if (chosen === undefined) return undefined;
    if (chosen.does === "project") return null;
    if (chosen.does === "file") return chosen.file;
    const found = await vscode.window.showOpenDialog({
        canSelectMany: false,
        openLabel: "Choose",
        filters: { "snapshots and recorded graphs": ["graph", "json", "gz"], "all files": ["*"] },
        ...(folder === undefined ? {} : { defaultUri: folder.uri }),
    });
    return found?.[0];
}

async function snapshots(folder: vscode.WorkspaceFolder): Promise<vscode.Uri[]> {
    const files = await vscode.workspace.findFiles(new vscode.RelativePattern(folder, PATTERN), LEFT_OUT, MOST);
    const kept = await Promise.all(files.map(async (file) => mayBeGraph(file.path, await head(file.fsPath))));
    const rank = (file: vscode.Uri) => `${file.path.endsWith(".graph") ? 0 : 1}${file.path}`;
    return files.filter((_, index) => kept[index]).sort((one, other) => (rank(one) < rank(other) ? -1 : 1));
}

async function head(file: string): Promise<Uint8Array> {
    try {
        const opened = await open(file);
        try {
            const { buffer, bytesRead } = await opened.read(Buffer.alloc(HEAD), 0, HEAD, 0);
            return buffer.subarray(0, bytesRead);
        } finally {
            await opened.close();
        }
    } catch {
        return new Uint8Array();
    }
}

async function folderOfEditor(): Promise<vscode.WorkspaceFolder | undefined> {
    const document = vscode.window.activeTextEditor?.document;
    const found = document === undefined ? undefined : vscode.workspace.getWorkspaceFolder(document.uri);
    const folders = vscode.workspace.workspaceFolders ?? [];
    return found ?? (folders.length > 1 ? vscode.window.showWorkspaceFolderPick() : folders[0]);
}
