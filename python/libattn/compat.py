"""Makes `import flash_attn` and `import flash_attn_interface` mean libattn, for programs that cannot be changed.

import libattn.compat
libattn.compat.install()
from flash_attn import flash_attn_func              # libattn's
from flash_attn.bert_padding import unpad_input     # and so on
import flash_attn_interface                         # FlashAttention-3's functions
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

VERSION = "2.8.3"  # the flash_attn whose functions these are; programs ask for it

MODULES = {
    "flash_attn": "libattn",
    "flash_attn.flash_attn_interface": "libattn.interface",
    "flash_attn.bert_padding": "libattn.bert_padding",
    "flash_attn.layers": "libattn.layers",
    "flash_attn.layers.rotary": "libattn.layers.rotary",
    "flash_attn_interface": "libattn.interface3",  # FlashAttention-3, whose arguments have other places
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the names above; the modules have the names of libattn's, imported when they are first asked for."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname in ("flash_attn", "flash_attn.layers"))

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        source = importlib.import_module(MODULES[module.__name__])
        module.__doc__ = source.__doc__
        module.__dict__.update({name: value for name, value in vars(source).items() if not name.startswith("__")})
        module.__getattr__ = lambda name: getattr(source, name)
        if module.__name__ == "flash_attn":
            module.__version__ = VERSION


_finder = _Finder()


def install() -> None:
    """From now on these names give libattn's modules. A flash_attn that was imported before is refused, not replaced."""
    if _finder in sys.meta_path:
        return
    taken = [name for name in MODULES if name in sys.modules]
    if taken:
        raise RuntimeError(
            f"{', '.join(taken)}: already imported from elsewhere; call libattn.compat.install() before that"
        )
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undoes install()."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        for name in MODULES:
            sys.modules.pop(name, None)
