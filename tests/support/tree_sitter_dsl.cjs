// What a grammar.js says, as the generator's grammar.json: node tree_sitter_dsl.cjs path/to/grammar.js
// Of the generator's own functions, those that a grammar needs; see "The grammar DSL" in the documentation of tree-sitter.
const path = require('path');

function rule(value) {
  if (typeof value === 'string') return { type: 'STRING', value };
  if (value instanceof RegExp) return { type: 'PATTERN', value: value.source };
  return value;
}

const symbols = new Proxy({}, { get: (_, name) => ({ type: 'SYMBOL', name }) });
const several = type => (...members) => ({ type, members: members.map(rule) });
const one = type => content => ({ type, content: rule(content) });
const ranked = type => (first, second) =>
  second === undefined
    ? { type, value: 0, content: rule(first) }
    : { type, value: first, content: rule(second) };

global.seq = several('SEQ');
global.choice = several('CHOICE');
global.repeat = one('REPEAT');
global.repeat1 = one('REPEAT1');
global.token = one('TOKEN');
global.optional = content => choice(content, { type: 'BLANK' });
global.field = (name, content) => ({ type: 'FIELD', name, content: rule(content) });
global.alias = (content, value) => ({
  type: 'ALIAS',
  content: rule(content),
  named: typeof value !== 'string',
  value: typeof value === 'string' ? value : value.name,
});
global.prec = Object.assign(ranked('PREC'), { left: ranked('PREC_LEFT'), right: ranked('PREC_RIGHT') });

global.grammar = said => {
  const names = key => (said[key] ? said[key](symbols).map(each => each.name) : []);
  const rules = Object.entries(said.rules).map(([name, make]) => [name, rule(make(symbols))]);
  return {
    name: said.name,
    word: said.word(symbols).name,
    rules: Object.fromEntries(rules),
    extras: said.extras(symbols).map(rule),
    conflicts: said.conflicts(symbols).map(group => group.map(each => each.name)),
    precedences: [],
    externals: said.externals(symbols).map(rule),
    inline: names('inline'),
    supertypes: names('supertypes'),
  };
};

process.stdout.write(JSON.stringify(require(path.resolve(process.argv[2]))));
