// Bundles the extension into dist/extension.js, beside it the licences of what it takes in; with --tests, the tests into
// build/tests.
import { build } from "esbuild";
import { readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";

const shared = { bundle: true, platform: "node", target: "node18", logLevel: "warning" };

if (process.argv.includes("--tests")) {
    const entryPoints = readdirSync("tests").filter((name) => name.endsWith(".test.ts")).map((name) => `tests/${name}`);
    rmSync("build/tests", { recursive: true, force: true });
    await build({ ...shared, format: "esm", entryPoints, outdir: "build/tests", outExtension: { ".js": ".mjs" } });
} else {
    const { metafile } = await build({
        ...shared,
        format: "cjs",
        entryPoints: ["src/extension.ts"],
        outfile: "dist/extension.js",
        external: ["vscode"],
        minify: true,
        metafile: true,
    });
    writeFileSync("dist/LICENSES.txt", licences(Object.keys(metafile.inputs)));
}

function licences(files) {
    const folders = new Set(files.map((file) => /^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(file)?.[1]).filter(Boolean));
    const texts = [...folders].sort().map((folder) => {
        const { name, version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
        const file = readdirSync(folder).find((each) => /^licen[cs]e/i.test(each));
        if (file === undefined) throw new Error(`${name} is bundled and brings no licence`);
        return `${name} ${version} (${license})\n\n${readFileSync(`${folder}/${file}`, "utf8").trim()}\n`;
    });
    return texts.join(`\n${"-".repeat(80)}\n\n`);
}
