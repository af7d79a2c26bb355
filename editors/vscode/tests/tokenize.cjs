// Tokens of texts as VS Code makes them. Each line of stdin is a JSON list of texts, each line of stdout its answer: for
// each text a list of [begin, end, scopes]. Offsets are in UTF-16 code units. Packages are those of editors/vscode/node_modules, or of NODE_PATH.
const fs = require('fs');
const path = require('path');
const readline = require('readline');
const textmate = require('vscode-textmate');
const oniguruma = require('vscode-oniguruma');

const GRAMMAR = path.join(__dirname, '..', 'syntaxes', 'policylang.tmLanguage.json');

function tokensOf(grammar, text) {
  const tokens = [];
  let state = textmate.INITIAL;
  let at = 0;
  for (const line of text.split('\n')) {
    const found = grammar.tokenizeLine(line, state);
    for (const token of found.tokens) {
      const end = Math.min(token.endIndex, line.length);
      if (end > token.startIndex) tokens.push([at + token.startIndex, at + end, token.scopes]);
    }
    state = found.ruleStack;
    at += line.length + 1;
  }
  return tokens;
}

async function main() {
  const wasm = path.join(path.dirname(require.resolve('vscode-oniguruma/package.json')), 'release', 'onig.wasm');
  await oniguruma.loadWASM(fs.readFileSync(wasm).buffer);
  const registry = new textmate.Registry({
    onigLib: Promise.resolve({
      createOnigScanner: patterns => new oniguruma.OnigScanner(patterns),
      createOnigString: text => new oniguruma.OnigString(text),
    }),
    loadGrammar: async () => textmate.parseRawGrammar(fs.readFileSync(GRAMMAR, 'utf8'), GRAMMAR),
  });
  const grammar = await registry.loadGrammar('source.policylang');
  for await (const line of readline.createInterface({ input: process.stdin })) {
    process.stdout.write(JSON.stringify(JSON.parse(line).map(text => tokensOf(grammar, text))) + '\n');
  }
}

main();
