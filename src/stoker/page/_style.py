"""The CSS of all pages: light or dark by the reader's setting, for screens, phones and print; colours of curves."""

from __future__ import annotations

COLOURS = ("#2f6690", "#b9551b", "#2c7a4b", "#85499c", "#b0344f", "#6f6a12")
"""Colours of curves on white; they differ in lightness too, for colour-blind readers."""
_DARK_COLOURS = ("#7fb2dc", "#eda067", "#7cc79a", "#c79ada", "#f08fa6", "#cbc66a")


def _variables(colours: tuple[str, ...]) -> str:
    return ";".join(f"--c{number}:{colour}" for number, colour in enumerate(colours))


_TEMPLATE = """
:root{--page:#fbfaf8;--card:#fff;--ink:#22242a;--quiet:#636873;--line:#e3e1dc;--bar:#5b7f9e;
--refuse:#a8322a;--refuse-soft:#fbeae8;--warn:#855a00;--warn-soft:#fbf2df;--note:#45617a;
--note-soft:#e9f0f5;--good:#2f6b45;--good-soft:#e6f2ea;
@LIGHT@}
@media (prefers-color-scheme:dark){:root{--page:#16181c;--card:#1d2025;--ink:#e6e4df;
--quiet:#9da2ac;--line:#32363d;--bar:#7ea3c2;--refuse:#f09a91;--refuse-soft:#43231f;
--warn:#e5bd6b;--warn-soft:#3a2f18;--note:#a5c3db;--note-soft:#22303b;--good:#93cfa8;
--good-soft:#1e3527;@DARK@}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
header,main{max-width:1120px;margin:0 auto;padding:0 20px}
header{padding-top:40px}
h1{font-size:1.7rem;line-height:1.25;font-weight:650;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:1.15rem;font-weight:650;margin:0 0 14px;overflow-wrap:anywhere}
h3{font-size:.95rem;font-weight:650;margin:22px 0 10px;overflow-wrap:anywhere}
p{margin:0 0 12px;max-width:72ch;overflow-wrap:anywhere}
.quiet,figcaption,dt{color:var(--quiet)}
nav{display:flex;flex-wrap:wrap;gap:4px 18px;padding:10px 0 14px;margin-bottom:28px;
border-bottom:1px solid var(--line);font-size:.9rem}
a{color:var(--note);overflow-wrap:anywhere;text-underline-offset:3px;text-decoration-thickness:1px}
section{margin:0 0 44px;scroll-margin-top:16px}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,150px),1fr));
gap:14px 24px;margin:0 0 18px}
dt{font-size:.8rem}.long{grid-column:span 2}
dd{margin:0;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px;
background:linear-gradient(to left,var(--card) 40%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(to left,color-mix(in srgb,var(--quiet) 45%,transparent),transparent) 100% 0/14px 100% no-repeat,
var(--card)}
.scroll:focus-visible{outline:2px solid var(--note);outline-offset:2px}
.scroll+p{margin-top:10px}
table{border-collapse:collapse;width:100%;font-size:.875rem}
th,td{padding:8px 14px;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
th{font-weight:600;font-size:.8rem;color:var(--quiet);white-space:nowrap}
td{min-width:8.5rem;overflow-wrap:anywhere}
td.number,th.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td.number,td.label{min-width:0;white-space:nowrap}
td.wide{min-width:17rem}
.tight th{white-space:normal;vertical-align:bottom}.tight th,.tight td{padding:8px}
.tight th:first-child,.tight td:first-child{padding-left:14px}
.tight th:last-child,.tight td:last-child{padding-right:14px}
code{font:.85em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.badge{display:inline-block;padding:0 8px;border-radius:99px;font-size:.75rem;font-weight:600;
line-height:1.6;white-space:nowrap;background:var(--note-soft);color:var(--note)}
.badge.refuse{background:var(--refuse-soft);color:var(--refuse)}
.badge.warn{background:var(--warn-soft);color:var(--warn)}
.badge.good{background:var(--good-soft);color:var(--good)}
.badge+.badge{margin-left:4px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,215px),1fr));gap:12px}
figure{margin:0;padding:12px 14px;min-width:0;background:var(--card);
border:1px solid var(--line);border-radius:10px}
figure .name{font-size:.85rem;font-weight:600;line-height:1.35;overflow-wrap:anywhere;
margin-bottom:8px;min-height:1.35em}
figcaption{overflow-wrap:anywhere;font-size:.75rem;line-height:1.45;font-variant-numeric:tabular-nums}
figcaption .ends{display:flex;justify-content:space-between;gap:8px}
figcaption p{margin:6px 0 0}
svg{display:block;width:100%}
.bar{fill:var(--bar)}.bar.marked{fill:var(--refuse)}
.bars{margin:0 0 6px;font-size:.85rem}
.bars .line{display:grid;grid-template:"who pic how"/17rem minmax(0,1fr) 6rem;gap:0 14px;
align-items:center;min-height:28px}
.bars .who{grid-area:who;line-height:1.3}.bars .pic{grid-area:pic;height:20px}
.bars .how{grid-area:how;text-align:right;font-variant-numeric:tabular-nums}
.bars .axis .pic{position:relative;color:var(--quiet);font-size:.75rem}
.bars .axis span{position:absolute;transform:translateX(-50%)}
.bars .axis span:first-child{transform:none}
.bars .axis span:last-child{transform:translateX(-100%)}
ul{margin:0 0 12px;padding-left:1.3em;max-width:90ch;overflow-wrap:anywhere}li{margin:2px 0}
td ul{margin:0;padding-left:1.1em}
details{margin:0 0 14px}summary{overflow-wrap:anywhere;cursor:pointer;padding:4px 0;color:var(--note)}
details[open]>summary{margin-bottom:8px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:14px;
margin:0 0 18px}
.charts>figure:last-child:nth-child(odd){grid-column:1/-1}
.chart .name{display:flex;justify-content:space-between;gap:10px;margin-bottom:4px}
.chart .unit{color:var(--quiet);font-weight:400;white-space:nowrap}
.chart .legend{display:flex;flex-wrap:wrap;gap:0 14px;font-size:.78rem;line-height:1.6;
min-height:1.6em;margin-bottom:8px;overflow-wrap:anywhere}
.chart .legend span{display:inline-flex;align-items:center;gap:6px;min-width:0}
.chart .legend svg{width:22px;height:10px;flex:none}
.chart .plot{display:grid;grid-template:190px 1.6em auto/auto minmax(0,1fr);column-gap:8px;
font-size:.75rem;color:var(--quiet);font-variant-numeric:tabular-nums}
.chart .ys{position:relative;text-align:right}.chart .ys i{visibility:hidden;font-style:normal}
.chart .ys span{position:absolute;right:0;transform:translateY(-50%);white-space:nowrap;line-height:1}
.chart .plot svg{height:190px;overflow:visible}
.chart .xs{grid-column:2;position:relative;margin-top:5px;line-height:1.4}
.chart .xs span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.chart .xs span.first{transform:none}.chart .xs span.last{transform:translateX(-100%)}
.chart .along{grid-column:2;text-align:center}
.chart figcaption{margin-top:8px}
.share{display:block;margin:-3px -5px;padding:3px 5px;border-radius:5px;
background:color-mix(in srgb,var(--bar) calc(var(--share)*.55),transparent)}
.meter{display:inline-block;min-width:4rem;padding-bottom:6px;
background:linear-gradient(var(--bar) 0 0) 0 100%/var(--share) 4px no-repeat,
linear-gradient(var(--line) 0 0) 0 100%/100% 4px no-repeat}
figure figure{border:0;padding:0 0 8px;background:none}
.grid+p{margin-top:14px}
.pictures{display:flex;gap:6px;margin-bottom:5px}
.pictures span{flex:1 1 0;min-width:0;max-width:160px;font-size:.75rem;color:var(--quiet)}
.colours span{display:inline-block;margin-right:14px;white-space:nowrap}
.colours i{display:inline-block;width:12px;height:12px;margin-right:5px;border:1px solid var(--quiet);border-radius:2px;
vertical-align:-1px}
.pictures img{display:block;width:100%;image-rendering:pixelated;border-radius:4px}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round;
vector-effect:non-scaling-stroke}
.curve.dots{stroke-width:5.5}.curve.dashed{stroke-dasharray:6 4}
.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}
.c4{stroke:var(--c4)}.c5{stroke:var(--c5)}
.band{fill:var(--good);fill-opacity:.13}
.limit{stroke:var(--quiet);stroke-width:1.3;stroke-dasharray:2 3;fill:none;
vector-effect:non-scaling-stroke}.limit.dashed{stroke-dasharray:8 3}
.base{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke;fill:none}
@media (max-width:520px){header,main{padding-left:14px;padding-right:14px}header{padding-top:24px}
h1{font-size:1.35rem}th,td{padding:7px 10px}
.bars .line{grid-template:"who how" "pic pic"/minmax(0,1fr) auto;padding:3px 0}.bars .pic{height:14px}
.stack thead{display:none}.stack,.stack tbody,.stack tr,.stack td{display:block;width:auto}
.stack tr{padding:10px 12px;border-bottom:1px solid var(--line)}.stack tr:last-child{border:0}
.stack td,.stack td.wide{border:0;padding:2px 0;min-width:0}.stack td.number{text-align:left}
.stack td.number::before{content:attr(data-head) " ";color:var(--quiet)}
.stack td:empty{display:none}
.tight th,.tight td{padding:7px 4px;font-size:.8rem}.tight th{font-size:.7rem}
.tight td .breaks{white-space:normal;overflow-wrap:normal}
.tight td.label{white-space:normal;min-width:4.8rem;overflow-wrap:normal}
.tight td:first-child,.tight th:first-child{position:sticky;left:0;background:var(--card)}
.tight th:first-child,.tight td:first-child{padding-left:8px}
.tight th:last-child,.tight td:last-child{padding-right:8px}
.meter{min-width:2.9rem}}
@media print{:root{--page:#fff;--card:#fff;--ink:#000;--quiet:#444;--line:#ccc}
body{font-size:10pt}nav{display:none}.scroll{overflow:visible;border-radius:0}
figure,tr{break-inside:avoid}h2,h3{break-after:avoid}
.bar,.badge,.band{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
STYLE = _TEMPLATE.replace("@LIGHT@", _variables(COLOURS)).replace(
    "@DARK@", _variables(_DARK_COLOURS)
)
