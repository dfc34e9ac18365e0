"""Options that several verbs share, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")]
SourceAt = Annotated[str | None, typer.Option(help="Where the source lies.")]
ReceiverAt = Annotated[str | None, typer.Option(help="Where the receiver lies.")]
SourcePrecision = Annotated[
    str | None,
    typer.Option(help="The source's weights: float32, bfloat16, float16, int8 or int4."),
]
ReceiverPrecision = Annotated[str | None, typer.Option(help="The receiver's weights, likewise.")]
SourceCache = Annotated[
    str | None,
    typer.Option(
        help="The source's cache: float32, bfloat16, float16, int8, fp8 or fp8_per_token_head."
    ),
]
ReceiverCache = Annotated[str | None, typer.Option(help="The receiver's cache, likewise.")]
AllowOtherPrecision = Annotated[
    bool,
    typer.Option(
        "--allow-other-precision", help="Serve the models in another precision than the map's."
    ),
]
Ridge = Annotated[bool, typer.Option("--ridge", help="Each map without its corrector as well.")]
SectionChars = Annotated[
    int | None,
    typer.Option(help="Cut texts at blank lines into documents of this size.", min=1),
]
TailTokens = Annotated[
    int, typer.Option(help="Last context tokens the receiver reads itself.", min=0)
]
Data = Annotated[
    Path, typer.Option(help="Folder of benchmark data, with openstax_mcq, mt_bench and so on.")
]
