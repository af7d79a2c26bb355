/**
 * The policy language for tree-sitter. The language itself is defined by grammar/apl.lark; this says the same so that an
 * editor has a tree of a text that is being written. Words are checked where their place says what they are (a unit, a
 * property), not against a list: a misspelt one is the language server's business.
 */

const BLANK = /[ \t\r\f\v\x1c-\x1f\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]/;

// Letters and digits of every script, as the language has them, without the quotes, dashes, arrows and comparisons beside.
const LETTER = String.raw`A-Za-z_\u00aa\u00b2\u00b3\u00b5\u00b9\u00ba\u00bc-\u00be\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u167f` +
  String.raw`\u1681-\u1fff\u2070-\u209c\u2100-\u218f\u2c00-\u2dff\u3005-\ud7ff\uf900-\ufdff\ufe70-\ufefc\uff10-\uffdc` +
  String.raw`\u{10000}-\u{10ffff}`;
const BRACED = String.raw`\[[^\[\]\n;#]*\]|\{[^{}\n;#]*\}`;

module.exports = grammar({
  name: 'policylang',

  // A line end ends a statement, but not inside parentheses: the scanner counts them.
  externals: $ => [$._newline, $._continuation, '(', ')', ';'],
  extras: $ => [BLANK, $.comment, $._continuation],
  word: $ => $.identifier,
  supertypes: $ => [$._selector, $._predicate],
  inline: $ => [$._value, $._block],
  // `bucket chain …` may begin a scheduling line or a rule about an operator of that name.
  conflicts: $ => [
    [$._soft, $.bucket],
    [$._soft, $.prefetch],
    [$._soft, $.delay],
    [$._soft, $.overlap],
  ],

  rules: {
    source_file: $ => seq(
      repeat($._end),
      optional(seq($.statement, repeat(seq(repeat1($._end), $.statement)), repeat($._end))),
    ),
    _end: $ => choice($._newline, ';'),

    statement: $ => choice(
      $.policy, $.requires, $.include, $.device, $.let, $.blocks, $.undecided, $.expect, $.schedule, $.balance,
      seq(repeat($.modifier), choice($.rule, $.fuse, $.collapse, $.chunk, $.bucket, $.prefetch, $.delay, $.overlap, $.keep_order)),
    ),
    modifier: _ => choice('optional', 'override'),

    policy: $ => seq('policy', field('name', choice($.identifier, $.path))),
    requires: $ => seq('requires', $.identifier, $.comparison, alias(choice($.integer, $.number, $.path), $.version)),
    include: $ => seq('include', choice($.string, $.bundled)),
    device: $ => seq('device', field('name', choice(
      $.string, alias(choice($._device_name, $.identifier, $.path, $.number, $.integer), $.device_name),
    ))),
    let: $ => seq('let', field('name', $.identifier), '=', field('selector', $._selector)),
    blocks: $ => seq('blocks', field('modules', $.glob)),
    undecided: $ => seq('undecided', $.arrow, field('fate', choice($.action, $.identifier))),
    schedule: $ => seq(
      'schedule', field('name', choice($.identifier, $.path)), 'into', $.integer, $._stage, 'of', $.integer,
      choice('microbatches', 'microbatch'),
    ),
    balance: $ => seq('balance', optional(seq('up', 'to')), $.quantity),
    fuse: $ => seq('fuse', $.identifier, 'chains', optional(seq('over', commaSeparated($.dimension)))),
    dimension: $ => $.identifier,
    collapse: _ => seq('collapse', 'round_trips'),
    chunk: $ => seq(
      'chunk',
      choice('loss', seq('module', field('modules', $.glob), optional(choice(seq('to', 'loss'), seq('in', 'block'))))),
      choice(seq('into', $.integer), seq('up', 'to', $.quantity)),
      optional(seq('over', 'tokens')),
    ),

    rule: $ => choice(
      seq(field('action', $.action), field('selector', $._selector), optional(choice($.budget, $.form))),
      seq(
        field('selector', $._selector), $.arrow, field('action', choice($.action, $.identifier)),
        optional(choice($.budget, $.form)),
      ),
    ),
    action: _ => choice(
      'save', 'must_save', 'prefer_save', 'recompute', 'prefer_recompute', 'must_recompute', 'offload',
      'prefer_offload', 'leave',
    ),
    budget: $ => seq('up', 'to', $.quantity, 'per', 'rank'),
    form: $ => seq('as', field('type', $.identifier), optional(seq('per', 'row'))),

    bucket: $ => seq('bucket', field('selector', $._selector), optional(seq('up', 'to', $.quantity))),
    prefetch: $ => seq('prefetch', choice(field('selector', $._selector), 'offloaded'), $.integer, $._block, 'ahead'),
    delay: $ => seq('delay', field('selector', $._selector), $.integer, $._block),
    overlap: $ => seq(
      'overlap', field('selector', $._selector),
      optional(seq('up', 'to', $.quantity, 'in', 'flight')),
      optional(seq('within', $.quantity, 'of', 'peak')),
    ),
    keep_order: $ => seq('keep', 'order', 'of', field('selector', $._selector)),

    expect: $ => seq('expect', choice(
      seq(choice('saved', seq('recomputed', optional($.figure))), optional(seq('per', 'block')), $.comparison, $.limit),
      seq($.figure, optional(seq('per', choice(alias('host', $.figure), $._stage))), $.comparison, $.limit,
        optional(seq('per', $._stage))),
      seq(choice('exactly', seq('at', choice('least', 'most'))), $.integer, field('selector', $._selector)),
      seq(optional(choice('every', 'no')), field('selector', $._selector), choice('saved', 'recomputed', 'offloaded')),
      'lossless',
    )),
    figure: $ => choice($.identifier, seq('step', 'time'), seq('host', 'memory')),
    limit: $ => seq($.quantity, optional(seq('of', $._whole))),
    _whole: $ => choice(alias($.identifier, $.figure), alias('step', $.figure)),

    // --- selectors: the comma binds loosest, the words that join phrases go left to right ---

    _selector: $ => choice($.union, $.joined, $.phrase),
    union: $ => prec.left(1, seq($._selector, ',', choice($.joined, $.phrase))),
    joined: $ => prec.left(2, seq(choice($.joined, $.phrase), choice(
      seq(choice('or', 'and', 'except', 'feeding', seq('fed', 'by')), $.phrase),
      seq('except', alias($.left_out, $.place)),
    ))),
    left_out: $ => prec.right(seq('in', $._place)),

    phrase: $ => prec.right(seq(repeat($._prefix), $._atom, repeat($._filter))),

    _prefix: $ => choice($.position, $.step, $.chain),
    position: $ => prec.right(choice(
      seq(choice('first', 'last'), optional($.integer)),
      $.ordinal,
      prec(1, seq('every', $.ordinal)),
    )),
    step: _ => seq(choice('users', 'inputs'), 'of'),
    chain: _ => seq('chain', choice('after', 'before', 'through')),

    _atom: $ => choice(
      'everything',
      field('name', $.identifier),
      field('name', $._soft),
      field('operator', $.path),
      $.parenthesized,
    ),
    // Words that open a statement, and are names wherever a name can stand.
    _soft: $ => choice(...['device', 'bucket', 'prefetch', 'delay', 'overlap', 'keep', 'chunk', 'schedule', 'balance'].map(word => alias(word, $.identifier))),
    parenthesized: $ => seq('(', $._selector, ')'),

    _filter: $ => choice($.place, $.where, $.chain_of, $.per, $.from),
    place: $ => prec.right(seq(choice('in', 'outside'), $._place)),
    _place: $ => prec.right(choice(
      field('modules', choice($.glob, alias($._stages_module, $.glob))),
      seq($._stage, choice($.integer, $.range)),
      seq('block', optional($.integer)),
      seq('blocks', optional($.range)),
      seq(choice('first', 'last'), optional($.integer), choice($._block, $._stage)),
      seq(choice('first', 'last'), choice(seq('half', 'of'), seq(choice($.integer, $.number), '%', 'of')), choice($._block, $._stage)),
      seq('every', $.ordinal, choice($._block, $._stage), optional($.from)),
      seq($.ordinal, choice('block', $._stage)),
    )),
    _block: _ => choice('block', 'blocks'),
    _stage: _ => choice('stage', 'stages'),
    // Behind `in`, without a number, a module that is called so.
    _stages_module: $ => alias($._stage, $.module),
    where: $ => seq('where', $._predicate),
    chain_of: $ => prec.right(seq('chain', optional(seq(choice('after', 'before'), $._atom)))),
    per: $ => seq('per', choice('block', 'module', 'chain', 'graph', seq($.integer, $._block))),
    from: $ => seq('from', $.ordinal),

    glob: $ => choice($.string, alias(choice($.identifier, $.path, $.integer, $.number), $.module)),

    // --- predicates: `and` and `or` behind `where` belong to the predicate ---

    _predicate: $ => choice($.any_of, $.all_of, $.negation, $.comparison_test, $.flag, $.grouped),
    any_of: $ => prec.left(3, seq($._predicate, 'or', $._predicate)),
    all_of: $ => prec.left(4, seq($._predicate, 'and', $._predicate)),
    negation: $ => prec(5, seq('not', $._predicate)),
    grouped: $ => seq('(', $._predicate, ')'),
    comparison_test: $ => seq(
      field('property', $.property),
      $.comparison,
      field('value', choice($.quantity, $.identifier, $.path, $.string)),
    ),
    property: $ => choice($.identifier, $.path, 'users', 'inputs', 'module'),
    flag: $ => choice(
      seq('is', optional('not'), $._value),
      seq('from', $._value),
      seq(field('name', $.identifier), choice($._value, 'block', 'saved', 'offloaded', $.path, $.string)),
      seq(field('name', $.identifier), 'cut', 'per', choice($.quantity, $._value)),
    ),
    _value: $ => field('value', $.identifier),

    quantity: $ => prec.right(seq(choice($.integer, $.number), optional(choice($.unit, '%')))),
    unit: $ => $.identifier,

    // --- words; of two that match as much, the earlier one ---

    comment: _ => token(/#[^\n]*/),
    string: _ => token(/"[^"\n]*"/),
    bundled: _ => token(/<[A-Za-z0-9_.-]+>/),
    comparison: _ => choice('==', '!=', '<=', '>=', '<', '>'),
    arrow: _ => choice('->', '→'),
    identifier: _ => token(new RegExp(`[${LETTER}][${LETTER}0-9]*`, 'u')),
    integer: _ => token(/[0-9][0-9_]*/),
    ordinal: _ => token(/[0-9]+(st|nd|rd|th)/),
    range: _ => token(/[0-9]+\.\.[0-9]+/),
    number: _ => token(/[0-9][0-9_]*(\.[0-9]+)?([eE][0-9]+)?[A-Za-zµμ]*/),
    path: _ => token(new RegExp(`([${LETTER}0-9.*?/:]|${BRACED})+`, 'u')),
    _device_name: _ => token(new RegExp(`[${LETTER}0-9][${LETTER}0-9.+\\-]*`, 'u')),
  },
});

function commaSeparated(rule) {
  return seq(rule, repeat(seq(',', rule)));
}
