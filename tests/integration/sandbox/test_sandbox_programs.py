"""What people run, under the table of system calls and without it: it comes to the same."""

# Scripts are as they are:
# ruff: noqa: E501

from collections.abc import Callable

import pytest

from sandbox import CommandResult, Policy, Sandbox

Create = Callable[..., Sandbox]
NOT_THERE = 77
# name: programs that it asks for, and a script whose output is the same each time.
PROGRAMS = {
    "python": (
        "python3",
        r"""python3 - <<'end'
import asyncio, concurrent.futures, multiprocessing, os, pathlib, shutil, socket, sqlite3, subprocess, tempfile
import mmap, select, signal, threading
with concurrent.futures.ThreadPoolExecutor(8) as pool: print(sum(pool.map(lambda n: n * n, range(100))))
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1, -2]))
print(subprocess.run(["sh", "-c", "echo out; echo err >&2; exit 3"], capture_output=True).returncode)
a, b = socket.socketpair(); a.send(b"x"); print(b.recv(1), socket.socket().family.name)
server = socket.create_server(("127.0.0.1", 0)); print(socket.create_connection(server.getsockname()).family.name)
async def main():
    done = await asyncio.create_subprocess_exec("true"); print(await done.wait())
asyncio.run(main())
with tempfile.TemporaryDirectory() as place:
    path = pathlib.Path(place, "a"); path.write_bytes(b"x" * 100000); shutil.copy2(path, f"{place}/b")
    shutil.copytree(place, "tree"); shutil.rmtree("tree"); print(len(os.listdir(place)))
    base = sqlite3.connect(f"{place}/base"); base.execute("pragma journal_mode=wal")
    base.execute("create table t (x)"); base.execute("insert into t values (1)"); base.commit(); base.close()
    with open(path, "r+b") as file: print(mmap.mmap(file.fileno(), 0)[:1])
os.sync(); print(os.sched_getaffinity(0) != set(), os.memfd_create("x") > 0, os.getrandom(1) != b"")
end""",
    ),
    "pytest": ("python3", "echo 'def test(): assert 1' > test_it.py && python3 -m pytest -q -p no:cacheprovider test_it.py | sed 's/in .*//'"),
    "pip": (
        "python3",
        "python3 -m pip --version >/dev/null || exit 77; mkdir -p p/q && echo x=1 > p/q/__init__.py && cd p && "
        "printf '[project]\\nname=\"q\"\\nversion=\"1\"\\n' > pyproject.toml && python3 -m pip list "
        "--disable-pip-version-check > /dev/null && python3 -m venv --without-pip e && e/bin/python -c 'print(1)'",
    ),
    "node": (
        "node",
        r"""node -e '
const {Worker, isMainThread} = require("worker_threads"), fs = require("fs"), http = require("http");
const {execSync} = require("child_process");
fs.writeFileSync("a", "x"); fs.copyFileSync("a", "b"); console.log(fs.readdirSync(".").length, `${execSync("echo up")}`);
new Worker("require(\"worker_threads\").parentPort.postMessage(7)", {eval: true}).on("message", m => {
  console.log(m);
  const server = http.createServer((q, r) => r.end("hello")).listen(0, "127.0.0.1", () =>
    http.get({port: server.address().port}, r => r.on("data", d => { console.log(`${d}`); server.close(); })));
});'""",
    ),
    "git": (
        "git",
        "export GIT_AUTHOR_DATE=2020-01-01T00:00:00 GIT_COMMITTER_DATE=2020-01-01T00:00:00 HOME=$PWD; git config "
        "--global user.email a@b; git config --global user.name a; git init -q r && cd r && seq 999 > a && git add . && "
        "git commit -qm one && git gc -q && git clone -q . ../c && git -C ../c log --format=%H && git fsck",
    ),
    "gcc": (
        "gcc make",
        r"""printf '#include <pthread.h>\n#include <stdio.h>\nstatic void *f(void *x) { return x; }\nint main(void) {
pthread_t t; void *r; pthread_create(&t, 0, f, "made"); pthread_join(t, &r); puts(r); return 0; }\n' > a.c
printf 'all: a b\na: a.c\n\tgcc -O2 -pthread -o $@ $<\nb: a.c\n\tgcc -fsanitize=address -pthread -o $@ $<\n' > Makefile
make -s -j4 && ./a && ASAN_OPTIONS=detect_leaks=1 ./b""",
    ),
    "thread sanitizer": (
        "gcc",
        r"""printf 'int main(void) { return 0; }\n' > a.c && gcc -fsanitize=thread -o a a.c || exit 77; ./a; echo $?""",
    ),
    "gdb": (
        "gdb gcc",
        "printf 'int f(int x) { return x + 1; }\\nint main(void) { return f(41) - 42; }\\n' > a.c && gcc -g -o a a.c && "
        "gdb -q -batch -ex 'break f' -ex run -ex 'print x' -ex continue ./a 2>&1 | grep -oE '^.1 = 41|exited normally'",
    ),
    "strace": ("strace", "strace -f -e trace=execve -o log sh -c 'true; env true' && grep -c execve log"),
    "archives": (
        "tar gzip find sort",
        "mkdir d && seq 5000 | split -l 100 - d/x && tar czf d.tgz d && mkdir e && tar xzf d.tgz -C e && diff -r d e/d && "
        "cp -a --reflink=auto d f && find f -type f -print0 | xargs -0 -P 4 -n 5 sha256sum | sort -k2 --parallel=2 | "
        "sha256sum && touch -d 2020-01-01 d/xaa && mkfifo p && chmod 600 p && ln d/xaa h && truncate -s 1M s && du -k s",
    ),
    "shells": ("bash", "sleep 100 & kill $!; wait $!; echo $?; ulimit -n; setarch -R true; echo $?; nice -n 5 true; timeout 1 true"),
    "packages": (
        "dpkg-deb dpkg",
        "mkdir -p p/DEBIAN p/opt/x && echo hi > p/opt/x/y && printf 'Package: x\\nVersion: 1\\nArchitecture: all\\n"
        "Maintainer: a <a@b>\\nDescription: x\\n' > p/DEBIAN/control && dpkg-deb -b p x.deb >/dev/null && mkdir -p r/var/lib/"
        "dpkg/info r/var/lib/dpkg/updates && touch r/var/lib/dpkg/status && dpkg --root=$PWD/r --force-not-root --log=$PWD/log "
        "--force-script-chrootless -i x.deb >/dev/null 2>&1; echo $?; cat r/opt/x/y; apt-get --version | head -1",
    ),
    "sqlite": ("sqlite3", "sqlite3 b 'pragma journal_mode=wal; create table t(x); insert into t values(1); select * from t'"),
    "java": ("java", "java -XX:+UseSerialGC -Xmx64m -version 2>&1 | grep -c version"),
    "tmux": ("tmux", "tmux -S s new-session -d 'echo up > o; sleep 9' && until [ -s o ]; do sleep .05; done; cat o; tmux -S s kill-server"),
}  # fmt: skip


def ended(result: CommandResult) -> tuple[str, int | None, str]:
    return result.reason, result.exit_code, result.stdout


@pytest.fixture
def pair(create: Create, substrate: str) -> tuple[Sandbox, Sandbox]:
    """With the table, and without."""
    options = {"substrate": substrate, "memory_mb": 1024, "pids": 256, "cpu": 2}
    return create(**options), create(**options, policy=Policy(without=frozenset({"seccomp"})))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_works_as_without_the_table(pair: tuple[Sandbox, Sandbox], name: str):
    programs, script = PROGRAMS[name]
    asks = " && ".join(f"command -v {each} >/dev/null" for each in programs.split())
    if not pair[0].commands.run(asks).ok:
        pytest.skip(f"{programs} not in this image")
    with_it, without = (each.commands.run(script, timeout_s=240) for each in pair)
    if without.exit_code == NOT_THERE:
        pytest.skip("the host has a part of it only")
    assert ended(with_it) == ended(without), with_it.stderr
    assert with_it.exit_code == 0, with_it.stderr
