"""Where the server listens: several addresses, UNIX sockets, shared ports, TLS, and what it says when it cannot."""

import shutil
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager

import aiohttp
import pytest

from mlxcel.api.app import build_app, start_site
from mlxcel.api.listen import urls
from mlxcel.errors import StartError
from tests.http.serving import wire

LOADING = 503


@asynccontextmanager
async def listening(**settings):
    """A server that is still loading; gives the URLs it says it can be reached at."""
    wired = wire(loaded=False, **settings)
    runner = await start_site(build_app(wired.services), wired.services.settings)
    try:
        yield urls(runner, wired.services.settings)
    finally:
        await runner.cleanup()
        wired.pool.shutdown()


async def status(url="http://x", path=None, **more):
    connector = aiohttp.UnixConnector(path) if path else None
    async with aiohttp.ClientSession(connector=connector) as session, session.get(f"{url}/health", **more) as response:
        return response.status


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


async def test_it_listens_on_tcp_addresses_and_unix_sockets_at_once(tmp_path):
    first, second = tmp_path / "a.sock", tmp_path / "b.sock"
    async with listening(host=f"127.0.0.1, {first},{second}") as where:
        assert where[1:] == [str(first), str(second)]
        assert await status(where[0]) == LOADING
        assert await status(path=str(first)) == await status(path=str(second)) == LOADING
    assert not first.exists() and not second.exists()


async def test_two_addresses_share_one_port():
    port = free_port()
    async with listening(host="127.0.0.1,127.0.0.2", port=port) as where:
        assert where == [f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port}"]
        assert [await status(url) for url in where] == [LOADING, LOADING]


async def test_all_addresses_of_a_name_get_the_same_free_port():
    async with listening(host="localhost") as where:
        assert len({url.rpartition(":")[2] for url in where}) == 1
        assert [await status(url) for url in where] == [LOADING] * len(where)


@needs_ipv6
async def test_the_ipv6_wildcard_takes_ipv4_too_unless_it_stands_among_others():
    async with listening(host="::") as (where,):
        port = where.rpartition(":")[2]
        assert where == f"http://[::]:{port}"
        assert await status(f"http://127.0.0.1:{port}") == await status(f"http://[::1]:{port}") == LOADING
    async with listening(host="::,0.0.0.0", port=free_port()) as where:
        assert len(where) == 2


async def test_a_shared_port_can_be_had_twice_and_another_only_once():
    port = free_port()
    async with listening(port=port, reuse_port=True):
        async with listening(port=port, reuse_port=True) as (where,):
            assert await status(where) == LOADING
        with pytest.raises(StartError, match=rf"^cannot listen on 127.0.0.1:{port}: Address already in use"):
            async with listening(port=port):
                pass


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("127.0.0.1,192.0.2.1", r"^cannot listen on 192.0.2.1:\d+: "),
        ("no.such.name.invalid", r"^cannot listen on no.such.name.invalid:\d+: "),
        ("/no/such/folder/x.sock", r"^cannot listen on /no/such/folder/x.sock: No such file"),
        (f"/tmp/{'x' * 200}.sock", r"^cannot listen on /tmp/x+.sock: .*too long"),
    ],
    ids=["address", "name", "folder", "length"],
)
async def test_an_address_that_cannot_be_had_is_named(host, message):
    with pytest.raises(StartError, match=message):
        async with listening(host=host, port=free_port()):
            pass


async def test_a_dead_servers_socket_file_is_replaced(tmp_path):
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with listening(host=str(path)):
        assert await status(path=str(path)) == LOADING


async def test_a_living_servers_socket_file_and_other_files_are_left_alone(tmp_path):
    path, file = tmp_path / "a.sock", tmp_path / "file.sock"
    file.write_text("precious")
    async with listening(host=str(path)):
        with pytest.raises(StartError, match=r"a.sock: Address already in use"):
            async with listening(host=str(path)):
                pass
        with pytest.raises(StartError, match=r"file.sock: there is a file of that name"):
            async with listening(host=str(file)):
                pass
        assert await status(path=str(path)) == LOADING
    assert file.read_text() == "precious"


async def test_a_socket_file_that_a_successor_made_stays_when_the_old_server_goes(tmp_path):
    path = tmp_path / "a.sock"
    async with listening(host=str(path)):
        path.unlink()
        successor = socket.socket(socket.AF_UNIX)
        successor.bind(str(path))
    assert path.exists()
    successor.close()


# --- TLS


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """A self-signed certificate, its key, the same key encrypted, and the key of somebody else."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("pem")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    for name in ("key", "other"):
        openssl("genpkey", *curve, "-out", name)
    openssl("req", "-x509", "-key", "key", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
            "-days", "2", "-out", "cert")  # fmt: skip
    openssl("pkey", "-in", "key", "-aes256", "-passout", "pass:secret", "-out", "encrypted")
    (folder / "text").write_text("not PEM at all\n")
    return folder


async def test_with_key_and_certificate_it_speaks_https_only(pem):
    files = {"ssl_key_file": str(pem / "key"), "ssl_cert_file": str(pem / "cert")}
    async with listening(**files) as (where,):
        assert where.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=pem / "cert")
        assert await status(where, ssl=trusting) == LOADING
        with pytest.raises(aiohttp.ClientError):
            await status(where.replace("https", "http"))


@pytest.mark.parametrize(
    ("key", "cert", "message"),
    [
        ("text", "cert", r"^--ssl-key-file: .*/text holds nothing usable"),
        ("cert", "cert", r"^--ssl-key-file: .*/cert holds nothing usable"),
        ("other", "cert", r"^--ssl-key-file: .*/other does not belong to the certificate"),
        ("encrypted", "cert", r"^--ssl-key-file: .*/encrypted: it is encrypted"),
        ("key", "text", r"^--ssl-cert-file: .*/text holds nothing usable"),
        ("key", "key", r"^--ssl-cert-file: .*/key holds nothing usable"),
    ],
)
async def test_a_file_that_is_no_key_or_certificate_is_said_of_its_flag(pem, key, cert, message):
    with pytest.raises(StartError, match=message):
        async with listening(ssl_key_file=str(pem / key), ssl_cert_file=str(pem / cert)):
            pass
