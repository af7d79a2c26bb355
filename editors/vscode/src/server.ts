// The language server as VS Code's client of it: one for the window, which asks for the settings of each folder.

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
import { asServed } from "./settings";

export const LANGUAGE = "policylang";
const SCHEMES = ["file", "untitled"];
const LAST_WORDS = 4000;
const PATIENCE = 2000;

/** Leaves the server's commands to ours of the same names, which show what the server only returns. */
class Client extends LanguageClient {
    override registerFeature(feature: StaticFeature | DynamicFeature<unknown>): void {
        if ("registrationType" in feature && feature.registrationType.method === ExecuteCommandRequest.method)
            feature.register = () => undefined;
        super.registerFeature(feature);
    }
}

export class Server implements vscode.Disposable {
    readonly output = vscode.window.createOutputChannel("policylang");
    private client: Client | undefined;
    private starting: Promise<Client | undefined> | undefined;
    private restarts = new Restarts();
    /** Whether the user knows of what is missing. */
    private said = false;

    private readonly published = new vscode.EventEmitter<vscode.Uri>();
    /** A policy was checked or planned, again after a change of its settings or its snapshot. */
    readonly onDidPublish = this.published.event;

    /** Starts where an open document wants it. A workspace that is not trusted may name any program, and any graph. */
    async serve(document: vscode.TextDocument): Promise<void> {
        if (document.languageId === LANGUAGE && SCHEMES.includes(document.uri.scheme)) await this.running();
    }

    /** What a command of the server's returns; null where there is no server. Throws what the server answers. */
    async ask<T>(command: string, ...args: unknown[]): Promise<T | null> {
        const client = await this.running();
        if (client === undefined) return null;
        return (await client.sendRequest(ExecuteCommandRequest.type, { command, arguments: args })) as T | null;
    }

    async restart(): Promise<void> {
        await this.stop();
        this.said = false;
        this.restarts = new Restarts();
        await Promise.all(vscode.workspace.textDocuments.map((document) => this.serve(document)));
    }

    async stop(): Promise<void> {
        await this.starting?.catch(() => undefined);
        const { client } = this;
        this.client = this.starting = undefined;
        await client?.dispose(PATIENCE).catch(() => undefined); // it may have ended by itself
    }

    private running(): Promise<Client | undefined> {
        if (!vscode.workspace.isTrusted) return Promise.resolve(undefined);
        this.starting ??= this.start();
        return this.starting;
    }

    private async start(): Promise<Client | undefined> {
        const setting = vscode.workspace.getConfiguration(LANGUAGE).get<string>("command", "").trim();
        const folders = (vscode.workspace.workspaceFolders ?? []).map((folder) => folder.uri.fsPath);
        const interpreter = await chosenInterpreter();
        const command = find({
            setting,
            folders,
            searchPath: process.env["PATH"] ?? "",
            windows: process.platform === "win32",
            home: homedir(),
            startable,
            ...(interpreter === undefined ? {} : { interpreter }),
        });
        if (command === undefined) {
            const words = setting === "" ? "it is not installed where it is looked for" : `there is no \`${setting}\``;
            void this.sayMissing(`policylang: ${words}.`, interpreter);
            return undefined;
        }
        this.client = this.made(command, folders[0]);
        try {
            await this.client.start();
            return this.client;
        } catch (error) {
            this.output.appendLine(String(error)); // the user hears of it where the process ends
            return undefined;
        }
    }

    private made(command: Command, folder: string | undefined): Client {
        const early = () => client.initializeResult === undefined;
        const started = async () => {
            this.output.appendLine(`starting ${[command.program, ...command.args].join(" ")}`);
            const child = spawn(command.program, command.args, { windowsHide: true, ...(folder === undefined ? {} : { cwd: folder }) });
            let written = "";
            child.stderr.on("data", (data: Buffer) => (written = (written + data.toString()).slice(-LAST_WORDS)));
            child.once("close", (code) => {
                if (early() && this.client === client) void this.sayMissing(didNotStart(command.program, code, written), command.python);
            });
            return child;
        };
        const client: Client = new Client(LANGUAGE, "policylang", started, this.options(early));
        return client;
    }

    private options(early: () => boolean): LanguageClientOptions {
        return {
            documentSelector: SCHEMES.map((scheme) => ({ scheme, language: LANGUAGE })),
            outputChannel: this.output,
            traceOutputChannel: this.output,
            initializationFailedHandler: () => false,
            errorHandler: {
                error: () => ({ action: ErrorAction.Continue }),
                closed: () => {
                    if (early()) return { action: CloseAction.DoNotRestart, handled: true };
                    if (this.restarts.again(Date.now())) return { action: CloseAction.Restart, handled: true };
                    const message = "policylang: the language server ended again and again, and is not started any more.";
                    return { action: CloseAction.DoNotRestart, message };
                },
            },
            middleware: {
                handleDiagnostics: (uri, diagnostics, next) => {
                    next(uri, diagnostics);
                    this.published.fire(uri);
                },
                workspace: {
                    configuration: async (params, token, next) => {
                        const found = await next(params, token);
                        return Array.isArray(found) ? found.map(asServed) : found;
                    },
                },
            },
        };
    }

    /** Once, until something is done about it. */
    private async sayMissing(words: string, python: string | undefined): Promise<void> {
        this.output.appendLine(words);
        if (this.said) return;
        this.said = true;
        const [inTerminal, choose, again] = ["Install in a terminal", "Choose the command", "Try again"];
        const chosen = await vscode.window.showErrorMessage(`${words} In a checkout of policylang: ${install(python)}`, inTerminal, choose, again);
        if (chosen === inTerminal) {
            const terminal = vscode.window.createTerminal("policylang");
            terminal.show();
            terminal.sendText(install(python), false); // the user reads it, and presses Enter
            const words = "policylang: once that is installed, start the server.";
            if ((await vscode.window.showInformationMessage(words, "Start")) === "Start") await this.restart();
        } else if (chosen === choose) {
            await vscode.commands.executeCommand("workbench.action.openSettings", "policylang.command");
            this.said = false;
        } else if (chosen === again) {
            await this.restart();
        }
    }

    dispose(): void {
        void this.stop();
        this.output.dispose();
        this.published.dispose();
    }
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
        getActiveEnvironmentPath(): { readonly path: string };
        resolveEnvironment(found: { readonly path: string }): Promise<{ readonly executable: { readonly uri?: vscode.Uri } } | undefined>;
    };
}

/** The interpreter that the Python extension has chosen, where it runs; it is not started for this. */
async function chosenInterpreter(): Promise<string | undefined> {
    const python = vscode.extensions.getExtension<PythonExtension>("ms-python.python");
    const environments = python?.isActive === true ? python.exports.environments : undefined;
    if (environments === undefined) return undefined;
    try {
        const found = await environments.resolveEnvironment(environments.getActiveEnvironmentPath());
        return found?.executable.uri?.fsPath;
    } catch {
        return undefined;
    }
}
