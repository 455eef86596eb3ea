"""A launched engine as something to be served: the facts and parts that routes, and `kvist chat`, need of it.

Owns that translation. Must not know HTTP; torch and the model come with the engine and are not imported before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.server.served import Served

if TYPE_CHECKING:
    from kvist.engine.launch import Launched


def served_model(launched: Launched, *, pin_share: float = 0.0, figures: bool = True) -> Served:
    """What is needed of a launched engine. `figures`: with its collector for Prometheus, whose client must be installed."""
    from kvist.engine.anatomy import anatomy
    from kvist.engine.gauges import gauges
    from kvist.engine.launch import image_reader
    from kvist.engine.metrics import collector
    from kvist.engine.microscope import Microscope
    from kvist.engine.pins import EnginePins

    client, engine = launched.engine, launched.engine.engine
    model = engine.model

    def stopped() -> str | None:
        return None if client.alive else "the engine has stopped; restart the server"

    return Served(
        name=launched.folder.name,
        engine=client,
        tokenizer=launched.tokenizer,
        context=engine.plan.context,
        vocab_size=model.config.vocab_size,
        bos_id=model.config.bos_token_id,
        eos_id=model.config.eos_token_id,
        created=launched.created,
        base=launched.base,
        fingerprint=f"fp_{launched.fingerprint.hex()[:16]}",
        image_token_id=model.config.image_token_id,
        read_image=image_reader(model),
        anatomy=anatomy(engine),
        microscope=Microscope(model, replay=engine.config.replay) if model.embed.weight.device.type == "cpu" else None,
        pins=EnginePins(client, pin_share, launched.list_folder),
        collectors=(collector(engine.metrics, lambda: gauges(engine)),) if figures else (),
        stopped=stopped,
    )
