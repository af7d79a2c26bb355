// The page of a plan, made fit for a panel.

const DARK = /@media\s*\(prefers-color-scheme:\s*dark\)/g;
const POLICY = /<meta\s+http-equiv="Content-Security-Policy"[^>]*>\s*/gi;
const SCHEME = /<meta\s+name="color-scheme"[^>]*>\s*/gi;
const SCRIPT = /<script(?=[\s>])/gi;

/** What keeps the place where somebody reads: a panel's page is replaced with each new plan. */
const KEEP_PLACE = `
const kept = acquireVsCodeApi();
const opened = () => [...document.querySelectorAll("details")];
const place = kept.getState();
if (place) {
  opened().forEach((each, index) => { each.open = place.open[index] ?? each.open; });
  scrollTo(0, place.top);
}
const keep = () => kept.setState({ top: scrollY, open: opened().map((each) => each.open) });
addEventListener("scroll", keep, { passive: true });
document.addEventListener("toggle", keep, true);
`;

/** The page with the editor's colours, and with a policy under which its own scripts run and nothing else: no script
 * that stands in a name of a graph, and nothing from a network. `nonce` is a new one each time. */
export function panelPage(html: string, nonce: string, dark: boolean): string {
    const allowed = `default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-${nonce}'; img-src data:`;
    const head =
        `<meta http-equiv="Content-Security-Policy" content="${allowed}">\n` +
        `<meta name="color-scheme" content="${dark ? "dark" : "light"}">\n`;
    return html
        .replace(POLICY, "")
        .replace(SCHEME, "")
        .replace(DARK, dark ? "@media all" : "@media not all")
        .replace(SCRIPT, `<script nonce="${nonce}"`)
        .replace(/<head[^>]*>\s*/i, (found) => found + head)
        .replace(/<\/body>/i, () => `<script nonce="${nonce}">{${KEEP_PLACE}}</script>\n</body>`);
}

/** What a panel shows where there is no plan. */
export function wordsPage(words: string): string {
    const text = words.replace(/[&<>]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[each] ?? each);
    return `<!doctype html>
<html lang="en">
<head><meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"></head>
<body><p>${text}</p></body>
</html>
`;
}
