"""The one style sheet: light and dark, no outside font, readable in print."""

STYLE = """
:root{color-scheme:light dark;--bg:#f7f7f4;--card:#fff;--ink:#1d2329;--soft:#667079;--line:#e2e3de;
--accent:#d6336c;--good:#1f7a4d;--good-bg:#e3f4ea;--bad:#a83232;--bad-bg:#fbe9e7;--warn:#8a5a00;
--warn-bg:#fdf1d7;--info:#2b5c9e;--info-bg:#e6effa;
--queue:#c3cbd6;--prefill:#3f86d9;--transfer:#35b5c1;--decode:#6457c8;--tool:#e58a2b;--sandbox:#2a9d8f;
--verify:#5f9e3a;--wait:#e9e9e4;--harness:#9a8f80;--handoff:#e377a6;--untraced:#d64545}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1c2126;--ink:#e6e8ea;--soft:#98a2ab;
--line:#2e353c;--accent:#ff6b9d;--good:#6fd3a0;--good-bg:#17352a;--bad:#ff9b93;--bad-bg:#402022;
--warn:#f0c36a;--warn-bg:#3a2e14;--info:#8fbcf2;--info-bg:#1b2f47;--queue:#55606c;--prefill:#5b9be6;
--transfer:#45c3cf;--decode:#8c80ea;--tool:#ec9a44;--sandbox:#3bb3a4;--verify:#7fbd58;--wait:#2a3037;
--harness:#a99d8c;--handoff:#e98ab3;--untraced:#ef6461}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:36px 24px 64px}
h1{font-size:28px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:20px;margin:0;letter-spacing:-.005em}
h3{font-size:13px;margin:26px 0 8px;text-transform:uppercase;letter-spacing:.06em;color:var(--soft)}
p{margin:6px 0}.sub,.note{color:var(--soft)}.note{font-size:13px}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:22px 24px;
margin-top:20px}
.head{display:flex;flex-wrap:wrap;gap:8px 10px;align-items:center}
.badge{font-size:12px;font-weight:600;padding:2px 10px;border-radius:99px;background:var(--info-bg);
color:var(--info)}
.badge.good{background:var(--good-bg);color:var(--good)}.badge.bad{background:var(--bad-bg);color:var(--bad)}
.badge.warn{background:var(--warn-bg);color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:10px;margin-top:16px}
.tile{border:1px solid var(--line);border-radius:9px;padding:9px 13px}
.tile b{display:block;font-size:20px;font-weight:650;font-variant-numeric:tabular-nums;line-height:1.3}
.tile span{font-size:12px;color:var(--soft)}
.cols{display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:0 28px;
align-items:start;margin-top:10px}
.scroll{max-height:420px;overflow:auto;border:1px solid var(--line);border-radius:9px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
th{font-size:12px;font-weight:600;color:var(--soft);background:var(--card);position:sticky;top:0}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.wide{overflow-wrap:anywhere}
.swatch{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
.meter{display:block;margin-top:7px;height:6px;border-radius:3px;background:var(--accent);min-width:1px}
.stack{display:flex;height:22px;border-radius:6px;overflow:hidden;background:var(--line)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:12.5px;color:var(--soft);margin-top:8px}
.timeline{overflow-x:auto;margin-top:4px}.timeline svg{display:block;width:100%;min-width:760px;height:auto}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--ink)}
svg .lane{text-anchor:end}svg .strong{font-weight:650;fill:var(--accent)}
svg .tick{text-anchor:middle;fill:var(--soft);font-size:11px}
svg .grid{stroke:var(--line);stroke-width:1}
.bar.off{opacity:.5}.bar.wasted{opacity:.22}.bar:hover{opacity:1;stroke:var(--ink);stroke-width:1}
.edge path{fill:none;stroke:var(--soft);stroke-width:1;opacity:.55}.edge circle{fill:var(--soft);opacity:.7}
.edge.on path{stroke:var(--accent);stroke-width:2;opacity:1}.edge.on circle{fill:var(--accent);opacity:1}
.edge:hover path{stroke-width:3;opacity:1}
svg .path{stroke:var(--accent);stroke-width:3.5}svg .path.dashed{stroke-dasharray:3 2}
.k-model-queue,.k-tool-queue{fill:var(--queue);background:var(--queue)}
.k-model-prefill{fill:var(--prefill);background:var(--prefill)}
.k-model-transfer{fill:var(--transfer);background:var(--transfer)}
.k-model-decode{fill:var(--decode);background:var(--decode)}
.k-tool-run{fill:var(--tool);background:var(--tool)}
.k-sandbox-create{fill:var(--sandbox);background:var(--sandbox)}
.k-verify{fill:var(--verify);background:var(--verify)}
.k-wait{fill:var(--wait);background:var(--wait)}.bar.k-wait{opacity:1;stroke:var(--line)}
.k-harness{fill:var(--harness);background:var(--harness)}
.k-handoff{fill:var(--handoff);background:var(--handoff)}
.k-untraced{fill:var(--untraced);background:var(--untraced)}
details{border:1px solid var(--line);border-radius:9px;margin-top:8px;padding:0 12px}
details details{border-width:0 0 0 3px;border-radius:0;margin:4px 0}
summary{cursor:pointer;padding:7px 0;font-weight:550}details details summary{font-weight:400;font-size:13.5px}
summary .sub{font-weight:400;font-size:13px;margin-left:8px}
pre{margin:4px 0 10px;padding:10px 12px;border-radius:7px;background:var(--bg);overflow:auto;max-height:360px;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}
pre.tool{border-left:3px solid var(--tool)}
@media print{body{background:#fff}.scroll{max-height:none}section{break-inside:avoid-page}}
"""
