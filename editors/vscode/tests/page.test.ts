import assert from "node:assert/strict";
import { test } from "node:test";
import { panelPage, wordsPage } from "../src/page";

const PAGE = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<style>:root { --ink: #000 } @media (prefers-color-scheme: dark) { :root { --ink: #fff } }</style>
</head>
<body>
<details><summary>blocks</summary></details>
<script type="application/json" id="data">{"name": "$& $1"}</script>
<script>"use strict"; show();</script>
</body>
</html>
`;

test("the page's own scripts run, and no other", () => {
    const made = panelPage(PAGE, "abc", true);
    const policies = made.match(/<meta http-equiv="Content-Security-Policy" content="([^"]*)"/g) ?? [];
    assert.equal(policies.length, 1);
    assert.match(made, /script-src 'nonce-abc'/);
    assert.doesNotMatch(made, /script-src[^;]*unsafe-inline/);
    assert.match(made, /default-src 'none'/);
    const scripts = made.match(/<script[^>]*>/g) ?? [];
    assert.equal(scripts.length, 3); // two of the page, and the one that keeps the place
    assert.ok(scripts.every((script) => script.includes('nonce="abc"')), scripts.join(" "));
    assert.ok(made.indexOf("Content-Security-Policy") < made.indexOf("<style>"));
});

test("the page has the editor's colours, whatever the system's are", () => {
    assert.match(panelPage(PAGE, "n", true), /<meta name="color-scheme" content="dark">/);
    assert.match(panelPage(PAGE, "n", true), /@media all \{/);
    assert.match(panelPage(PAGE, "n", false), /@media not all \{/);
    assert.doesNotMatch(panelPage(PAGE, "n", false), /light dark|prefers-color-scheme/);
});

test("what a graph's names say is left as it is", () => {
    assert.ok(panelPage(PAGE, "n", false).includes('{"name": "$& $1"}'));
});

test("where there is no plan, words are words", () => {
    assert.ok(wordsPage("<b> & no plan").includes("<p>&lt;b&gt; &amp; no plan</p>"));
    assert.ok(wordsPage("").includes("default-src 'none'"));
});
