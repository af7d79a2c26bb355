// One language server for each folder of the workspace: each has its own settings and its own snapshot.

import { spawn } from "node:child_process";
import { accessSync, constants, statSync } from "node:fs";
import { homedir } from "node:os";
import * as vscode from "vscode";
import {
    CloseAction,
    type DynamicFeature,
    ErrorAction,
    ExecuteCommandRequest,
    LanguageClient,
    type LanguageClientOptions,
    type StaticFeature,
} from "vscode-languageclient/node";
import { didNotStart, Restarts } from "./failure";
import { type Command, find, install } from "./finding";
import { initializationOptions } from "./settings";

export const LANGUAGE = "policylang";

/** What a server is working with: its own answer, since it reads the project's file too. */
export interface InUse {
    readonly graph: string | null;
    readonly path: string | null;
    readonly device: string | null;
}

/** Leaves the server's commands to ours of the same names: they show what the server only returns, and two servers may
 * not register one command twice. */
class Client extends LanguageClient {
    override registerFeature(feature: StaticFeature | DynamicFeature<unknown>): void {
        if ("registrationType" in feature && feature.registrationType.method === ExecuteCommandRequest.method)
            feature.register = () => undefined;
        super.registerFeature(feature);
    }
}

/** A folder's server, from its first document on. */
class Server {
    private client: Client | undefined;
    private starting: Promise<Client | undefined> | undefined;
    private readonly restarts = new Restarts();
    private stopped = false;

    constructor(
        readonly folder: vscode.WorkspaceFolder | undefined,
        private readonly servers: Servers,
    ) {}

    async running(): Promise<Client | undefined> {
        this.starting ??= this.start();
        return this.starting;
    }

    private async start(): Promise<Client | undefined> {
        const folders = this.folder === undefined ? [] : [this.folder.uri.fsPath];
        const scope = this.folder?.uri;
        const settings = vscode.workspace.getConfiguration("policylang", scope);
        const interpreter = await chosenInterpreter(scope);
        const command = find({
            setting: settings.get<string>("command", "").trim(),
            folders,
            searchPath: process.env["PATH"] ?? "",
            windows: process.platform === "win32",
            home: homedir(),
            startable,
            ...(interpreter === undefined ? {} : { interpreter }),
        });
        if (command === undefined) {
            const named = settings.get<string>("command", "").trim();
            const words = named === "" ? "policylang is not installed where it is looked for" : `there is no \`${named}\``;
            void this.servers.sayMissing(`policylang: ${words}.`, interpreter);
            return undefined;
        }
        const client = this.made(command, initializationOptions((name) => settings.get(name)));
        this.client = client;
        try {
            await client.start();
        } catch (error) {
            this.servers.output.appendLine(String(error)); // said to the user where the process ended
            return undefined;
        }
        return client;
    }

    private made(command: Command, options: object): Client {
        const { output } = this.servers;
        let written = "";
        let ended = false;
        const process = async () => {
            output.appendLine(`starting ${[command.program, ...command.args].join(" ")}`);
            const child = spawn(command.program, [...command.args], {
                ...(this.folder === undefined ? {} : { cwd: this.folder.uri.fsPath }),
                windowsHide: true,
            });
            written = "";
            child.stderr.on("data", (data: Buffer) => (written = (written + data.toString()).slice(-4000)));
            child.once("exit", (code) => {
                ended = true;
                if (!client.initializeResult && !this.stopped)
                    void this.servers.sayMissing(didNotStart(command.program, code, written), command.python);
            });
            return child;
        };
        const hopeless = () => ended && !client.initializeResult;
        const client: Client = new Client("policylang", "policylang", process, this.options(options, hopeless));
        return client;
    }

    private options(initialization: object, hopeless: () => boolean): LanguageClientOptions {
        const mine = (params: unknown) => {
            const uri = uriIn(params);
            return uri === undefined || this.servers.of(uri) === this;
        };
        return {
            documentSelector: ["file", "untitled"].map((scheme) => ({ scheme, language: LANGUAGE })),
            ...(this.folder === undefined ? {} : { workspaceFolder: this.folder }),
            initializationOptions: initialization,
            outputChannel: this.servers.output,
            traceOutputChannel: this.servers.output,
            initializationFailedHandler: () => false,
            errorHandler: {
                error: () => ({ action: ErrorAction.Continue }),
                closed: () =>
                    !hopeless() && this.restarts.again(Date.now())
                        ? { action: CloseAction.Restart, handled: true }
                        : { action: CloseAction.DoNotRestart, handled: hopeless() },
            },
            middleware: {
                sendNotification: async (type, next, params) => (mine(params) ? next(type, params) : undefined),
                sendRequest: async (type, params, token, next) =>
                    mine(params) ? next(type, params, token) : (null as never),
            },
        };
    }

    async ask<T>(command: string, args: unknown[]): Promise<T | null> {
        const client = await this.running();
        if (client === undefined) return null;
        return (await client.sendRequest(ExecuteCommandRequest.type, { command, arguments: args })) as T | null;
    }

    async stop(): Promise<void> {
        this.stopped = true;
        const { client } = this;
        this.client = undefined;
        await client?.dispose(2000).catch(() => undefined);
    }
}

export class Servers implements vscode.Disposable {
    readonly output = vscode.window.createOutputChannel("policylang");
    private readonly made = new Map<string, Server>();
    private said = false;
    private readonly whenChanged = new vscode.EventEmitter<void>();
    /** A server has started, or was started anew. */
    readonly onDidChange = this.whenChanged.event;

    /** Of a document's folder; of one outside every folder, the first folder's. */
    of(uri: string): Server {
        const folders = vscode.workspace.workspaceFolders ?? [];
        const found = vscode.workspace.getWorkspaceFolder(vscode.Uri.parse(uri));
        const folder = found ?? folders[0];
        const key = folder?.uri.toString() ?? "";
        let server = this.made.get(key);
        if (server === undefined) this.made.set(key, (server = new Server(folder, this)));
        return server;
    }

    /** Starts what an open document wants. */
    async serve(document: vscode.TextDocument): Promise<void> {
        if (document.languageId !== LANGUAGE || !["file", "untitled"].includes(document.uri.scheme)) return;
        if (!vscode.workspace.isTrusted) return;
        if ((await this.of(document.uri.toString()).running()) !== undefined) this.whenChanged.fire();
    }

    /** What a command of the server's returns; null where there is no server. Throws what the server answers. */
    async ask<T>(uri: vscode.Uri, command: string, ...args: unknown[]): Promise<T | null> {
        if (!vscode.workspace.isTrusted) return null;
        return this.of(uri.toString()).ask<T>(command, args);
    }

    async restart(): Promise<void> {
        await this.stop();
        this.said = false;
        await Promise.all(vscode.workspace.textDocuments.map((document) => this.serve(document)));
        this.whenChanged.fire();
    }

    async stop(): Promise<void> {
        const servers = [...this.made.values()];
        this.made.clear();
        await Promise.all(servers.map((server) => server.stop()));
    }

    /** Once, until something is done about it. */
    async sayMissing(words: string, python: string | undefined): Promise<void> {
        this.output.appendLine(words);
        if (this.said) return;
        this.said = true;
        const [inTerminal, choose, again, show] = ["Install in a terminal", "Choose the command", "Try again", "Show output"];
        const chosen = await vscode.window.showErrorMessage(`${words} ${install(python)}`, inTerminal, choose, again, show);
        if (chosen === inTerminal) {
            const terminal = vscode.window.createTerminal("policylang");
            terminal.show();
            terminal.sendText(install(python), false); // the user reads it, and presses Enter
            this.said = false;
        } else if (chosen === choose) {
            await vscode.commands.executeCommand("workbench.action.openSettings", "policylang.command");
        } else if (chosen === again) {
            await this.restart();
        } else if (chosen === show) {
            this.output.show();
        }
    }

    dispose(): void {
        void this.stop();
        this.output.dispose();
        this.whenChanged.dispose();
    }
}

/** The document that a message is about; none of one that is about the whole session. */
function uriIn(params: unknown): string | undefined {
    const document = (params as { textDocument?: { uri?: unknown } } | undefined)?.textDocument;
    return typeof document?.uri === "string" ? document.uri : undefined;
}

function startable(file: string): boolean {
    try {
        accessSync(file, constants.X_OK);
        return statSync(file).isFile();
    } catch {
        return false;
    }
}

interface PythonExtension {
    readonly environments?: {
        getActiveEnvironmentPath(resource?: vscode.Uri): { readonly path: string };
        resolveEnvironment(found: { readonly path: string }): Promise<{ readonly executable: { readonly uri?: vscode.Uri } } | undefined>;
    };
}

/** The interpreter that the Python extension has chosen for a folder, where it runs; it is not started for this. */
async function chosenInterpreter(scope: vscode.Uri | undefined): Promise<string | undefined> {
    const python = vscode.extensions.getExtension<PythonExtension>("ms-python.python");
    const environments = python?.isActive === true ? python.exports.environments : undefined;
    if (environments === undefined) return undefined;
    try {
        const found = await environments.resolveEnvironment(environments.getActiveEnvironmentPath(scope));
        return found?.executable.uri?.fsPath;
    } catch {
        return undefined;
    }
}
