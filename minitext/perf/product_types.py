"""Which types a compiled train step really multiplies.

Chapters: 25.
"""

from typing import Any, NamedTuple

from minitext.compiler.aot import read_dump
from minitext.compiler.hlo import Module, Product
from minitext.config.config import Config
from minitext.errors import DoesNotFit
from minitext.terminal import print_tables, table
from minitext.training.compile import compile_preset

NARROW = ("s8", "f8")  # how HLO's names of 8-bit types begin


class Products(NamedTuple):
    """The matrix products of a step compiled for a target.

    Attributes:
      target: what it was compiled for.
      products: in the program's order; each counts once, however often a loop runs it.
    """

    target: str
    products: list[Product]

    def count(self, *, narrow: bool = False) -> int:
        """Returns how many products a step runs, all or those of two 8-bit factors."""
        return sum(p.runs for p in self.products if not narrow or is_narrow(p))

    def to_json(self) -> dict[str, Any]:
        """Returns the products as JSON values, and how many of the step's have two 8-bit factors."""
        rows = [p._asdict() | {"pass": pass_of(p), "narrow": is_narrow(p)} for p in self.products]
        counts = {"runs": self.count(), "narrow_runs": self.count(narrow=True)}
        return {"target": self.target, **counts, "products": rows}


def is_narrow(product: Product) -> bool:
    """Whether both factors are 8-bit numbers as they are multiplied."""
    return len(product.types) == 2 and all(kind.startswith(NARROW) for kind in product.types)


def pass_of(product: Product) -> str:
    """Returns `backward`, which includes recomputation, or `forward`."""
    return "backward" if "transpose(" in product.where else "forward"


def find_products(cfg: Config, target: str) -> Products:
    """Compiles the train step of a configuration for a target and lists its products.

    Products inside kernels, such as attention's, aren't seen.

    Raises:
      DoesNotFit: if the step needs more memory than the target has.
      UserError: for a bad target, or a mesh that fits neither the target nor the model.
    """
    texts: list[str] = []
    report = compile_preset(
        cfg, target, lambda _lowered, _compiled, at: texts.append(read_dump(at)[1])
    )
    if not report.fits:
        raise DoesNotFit(
            f"target={report.target}: the step does not fit: minitext compile says what to change"
        )
    return Products(report.target, Module(texts[0]).products())


def print_products(found: Products) -> None:
    """Prints a row for each product, and how many have 8-bit factors, on stdout."""
    rows = [
        (pass_of(p), _place(p), " x ".join(p.types), p.result, f"{p.runs}") for p in found.products
    ]
    heads = ("pass", "where", "multiplies", "result", "runs")
    print_tables(table(heads, rows, right=(4,)))
    narrow, runs = found.count(narrow=True), found.count()
    print(f"{found.target}: {narrow} of {runs} products in a step multiply 8-bit numbers")


def _place(product: Product) -> str:
    """Returns the end of JAX's name: the part of the layer, and the product's letters."""
    return "/".join(product.where.split("/")[-3:-1])
