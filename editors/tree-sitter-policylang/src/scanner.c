// Where a statement ends: at a line end outside parentheses. A parenthesis that is never closed does not swallow the rest
// of the file: line ends count in its statement, as in policylang/language/lexer.py.

#include "tree_sitter/parser.h"

#include <stdlib.h>

enum { NEWLINE, CONTINUATION, OPEN, CLOSE, SEMICOLON };

// A statement of more text is refused, so what closes a parenthesis is no further away.
enum { FURTHEST = 64 * 1024, DEEPEST = 0xffff };

typedef struct {
  uint16_t depth;
  bool broken;  // an earlier parenthesis of this statement is never closed
} Scanner;

void *tree_sitter_policylang_external_scanner_create(void) { return calloc(1, sizeof(Scanner)); }

void tree_sitter_policylang_external_scanner_destroy(void *payload) { free(payload); }

unsigned tree_sitter_policylang_external_scanner_serialize(void *payload, char *buffer) {
  const Scanner *scanner = (const Scanner *)payload;
  buffer[0] = (char)(scanner->depth & 0xff);
  buffer[1] = (char)(scanner->depth >> 8);
  buffer[2] = (char)scanner->broken;
  return 3;
}

void tree_sitter_policylang_external_scanner_deserialize(void *payload, const char *buffer, unsigned length) {
  Scanner *scanner = (Scanner *)payload;
  scanner->depth = length == 3 ? (uint16_t)((unsigned char)buffer[0] | (unsigned char)buffer[1] << 8) : 0;
  scanner->broken = length == 3 && buffer[2];
}

static bool is_blank(int32_t c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v' || (c >= 0x1c && c <= 0x1f) || c == 0x85 ||
         c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000 || c == 0xfeff;
}

// Whether the parenthesis before the cursor has one that closes it. Comments and quoted texts hold none.
static bool is_closed(TSLexer *lexer) {
  unsigned depth = 1;
  for (unsigned seen = 0; seen < FURTHEST && !lexer->eof(lexer); seen++) {
    int32_t c = lexer->lookahead;
    if (c == '(') depth++;
    if (c == ')' && --depth == 0) return true;
    lexer->advance(lexer, false);
    if (c == '#' || c == '"') {
      while (!lexer->eof(lexer) && lexer->lookahead != '\n' && !(c == '"' && lexer->lookahead == '"')) {
        lexer->advance(lexer, false);
        seen++;
      }
      if (lexer->lookahead == '"') lexer->advance(lexer, false);
    }
  }
  return false;
}

static bool found(TSLexer *lexer, int symbol) {
  lexer->advance(lexer, false);
  lexer->mark_end(lexer);
  lexer->result_symbol = (TSSymbol)symbol;
  return true;
}

bool tree_sitter_policylang_external_scanner_scan(void *payload, TSLexer *lexer, const bool *valid) {
  Scanner *scanner = (Scanner *)payload;
  while (is_blank(lexer->lookahead)) lexer->advance(lexer, true);
  switch (lexer->lookahead) {
    case '\n':
      if (scanner->depth > 0) return valid[CONTINUATION] && found(lexer, CONTINUATION);
      if (!valid[NEWLINE]) return false;
      scanner->broken = false;
      return found(lexer, NEWLINE);
    case '(':
      if (!valid[OPEN]) return false;
      found(lexer, OPEN);
      if (scanner->depth > 0) {
        if (scanner->depth < DEEPEST) scanner->depth++;
      } else if (!scanner->broken) {
        if (is_closed(lexer)) scanner->depth = 1;
        else scanner->broken = true;
      }
      return true;
    case ')':
      if (!valid[CLOSE]) return false;
      if (scanner->depth > 0) scanner->depth--;
      return found(lexer, CLOSE);
    case ';':
      if (scanner->depth > 0 || !valid[SEMICOLON]) return false;
      scanner->broken = false;
      return found(lexer, SEMICOLON);
    default:
      return false;
  }
}
