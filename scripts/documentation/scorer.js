// How Sphinx's search ranks what it finds: its own weights, with the pages of codes and the changelog behind all guides.
"use strict";
var Scorer = {
  score: ([page, , , , score]) => score - (/^(codes\/|changelog$|repository\/)/.test(page) ? 100 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
