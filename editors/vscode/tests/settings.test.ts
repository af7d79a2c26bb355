import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { didNotStart, Restarts, saidBy } from "../src/failure";
import { asServed, SERVED } from "../src/settings";
import { asSetting, mayBeGraph, shortName } from "../src/snapshots";

const bytes = (text: string) => new TextEncoder().encode(text);

test("what is set goes to the server, and what is empty is left to the project's file", () => {
    const section = { graph: " a.graph ", path: "", device: null, pause: 0, command: "x", trace: { server: "off" } };
    assert.deepEqual(asServed(section), { graph: "a.graph", pause: 0 });
    assert.equal(asServed(null), null);
});

test("every setting is the server's, the command, or the trace", () => {
    const { contributes } = JSON.parse(readFileSync("package.json", "utf8"));
    const names = Object.keys(contributes.configuration.properties).map((name) => name.replace("policylang.", ""));
    assert.deepEqual(names.sort(), [...SERVED, "command", "trace.server"].sort());
});

test("a snapshot in the folder is named from the folder, another by its whole path", () => {
    assert.equal(asSetting("/project/graphs/a.graph", "/project"), "graphs/a.graph");
    assert.equal(asSetting("/other/a.graph", "/project"), "/other/a.graph");
    assert.equal(asSetting("/work-2/a.graph", "/project"), "/work-2/a.graph");
    assert.equal(asSetting("/a.graph", undefined), "/a.graph");
    assert.equal(shortName("graphs/llama3_8b.graph"), "llama3_8b");
    assert.equal(shortName("recorded.json.gz"), "recorded");
});

test("a graph is told by its first bytes: settings of tools are JSON too", () => {
    assert.ok(mayBeGraph("a.graph", Uint8Array.of(0x8a, 0x41, 0x50, 0x4c, 0x47, 0x0d)));
    assert.ok(mayBeGraph("a.graph", bytes("# mine\n%x = input(f32[4])\n")));
    assert.ok(mayBeGraph("a.json.gz", Uint8Array.of(0x1f, 0x8b, 8)));
    assert.ok(mayBeGraph("a.json", bytes('{"fields": ["name"], "nodes": []}')));
    assert.ok(!mayBeGraph("package.json", bytes('{"name": "x"}')));
    assert.ok(!mayBeGraph("a.graph", bytes("nothing")));
    assert.ok(!mayBeGraph("a.graph", new Uint8Array()));
});

test("a server that does not start says why in its own words", () => {
    const written = "policylang lsp: the language server needs pygls, which is not installed\nhelp: pip install pygls\n";
    assert.equal(saidBy(written), "the language server needs pygls, which is not installed");
    assert.match(didNotStart("/x/policylang", 2, written), /needs pygls.*\/x\/policylang/);
    assert.equal(saidBy("/usr/bin/python: No module named policylang\n"), "/usr/bin/python: No module named policylang");
    assert.match(didNotStart("p", 1, ""), /ended with code 1/);
    assert.match(didNotStart("p", null, ""), /was ended/);
});

test("a server that ends again and again is left alone", () => {
    const often = new Restarts(2, 1000);
    assert.deepEqual([0, 1, 2].map((time) => often.again(time)), [true, true, false]);
    const seldom = new Restarts(2, 1000);
    assert.deepEqual([0, 1, 2000].map((time) => seldom.again(time)), [true, true, true]);
});
