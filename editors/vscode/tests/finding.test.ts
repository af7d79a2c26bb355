import assert from "node:assert/strict";
import { test } from "node:test";
import { find, install, type Surroundings } from "../src/finding";

function around(files: string[], changes: Partial<Surroundings> = {}): Surroundings {
    return {
        setting: "",
        folders: ["/project"],
        searchPath: "/usr/local/bin:/usr/bin",
        windows: false,
        home: "/home/user",
        startable: (file) => files.includes(file),
        ...changes,
    };
}

test("the workspace's environment goes before the interpreter that is chosen, and that before the PATH", () => {
    const path = ["/usr/bin/policylang"];
    const interpreter = ["/conda/bin/python", "/conda/bin/policylang"];
    const venv = ["/project/.venv/bin/policylang", "/project/.venv/bin/python"];
    const chosen = { interpreter: "/conda/bin/python" };
    assert.deepEqual(find(around(path)), { program: "/usr/bin/policylang", args: ["lsp"] });
    const module = { program: "/conda/bin/python", args: ["-P", "-m", "policylang", "lsp"], python: "/conda/bin/python" };
    assert.deepEqual(find(around([...path, ...interpreter], chosen)), module);
    const own = { program: "/project/.venv/bin/policylang", args: ["lsp"], python: "/project/.venv/bin/python" };
    assert.deepEqual(find(around([...path, ...interpreter, ...venv], chosen)), own);
});

test("an interpreter without policylang gives way to the PATH, and is where to install it where there is none", () => {
    const chosen = { interpreter: "/conda/bin/python" };
    const bare = ["/conda/bin/python"];
    assert.equal(find(around([...bare, "/usr/bin/policylang"], chosen))?.program, "/usr/bin/policylang");
    assert.equal(find(around(bare, chosen))?.program, "/conda/bin/python");
});

test("a setting is taken, or nothing is", () => {
    const there = ["/usr/bin/policylang", "/opt/bin/policylang", "/project/env/bin/python3.12", "/home/user/bin/policylang"];
    assert.equal(find(around(there, { setting: "/opt/bin/policylang" }))?.program, "/opt/bin/policylang");
    assert.equal(find(around(there, { setting: "/gone/policylang" })), undefined);
    assert.equal(find(around(there, { setting: "~/bin/policylang" }))?.program, "/home/user/bin/policylang");
    assert.equal(find(around(there, { setting: "policylang" }))?.program, "/usr/bin/policylang");
    const relative = { program: "/project/env/bin/python3.12", args: ["-P", "-m", "policylang", "lsp"], python: "/project/env/bin/python3.12" };
    assert.deepEqual(find(around(there, { setting: "env/bin/python3.12" })), relative);
    assert.deepEqual(find(around(there, { setting: "${workspaceFolder}/env/bin/python3.12" })), relative);
});

test("each folder of a workspace may have the environment, and without a folder there is the PATH", () => {
    const there = ["/b/.venv/bin/policylang", "/usr/bin/policylang"];
    assert.equal(find(around(there, { folders: ["/a", "/b"] }))?.program, "/b/.venv/bin/policylang");
    assert.equal(find(around(there, { folders: [] }))?.program, "/usr/bin/policylang");
    assert.equal(find(around([])), undefined);
});

test("what is missing is installed where the command is from", () => {
    assert.equal(install(undefined), 'pip install ".[lsp]"');
    assert.equal(install("/project/.venv/bin/python"), '/project/.venv/bin/python -m pip install ".[lsp]"');
    assert.equal(install("/my env/bin/python"), '"/my env/bin/python" -m pip install ".[lsp]"');
});
