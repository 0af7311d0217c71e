"""Three ranks form many groups, one after the other, and lose some of them in every way. In the end no thread, no
socket and no other descriptor is left over. The groups leave the script's own connections and servers open, and ask no
name service: none answers here."""

import ctypes
import datetime
import os
import random
import socket
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist

import ranks
from elastic_agent.torch import group as groups
from elastic_agent.torch import state
from elastic_agent.torch.group import Group, GroupLost
from elastic_agent.torch.store import Store

RANKS = 3


def without_name_service():
    """From now on, questions for names in this process and its children are not answered. It needs root's rights."""
    silent, config = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), tempfile.NamedTemporaryFile("w")
    libc, own_mounts, private, bind = ctypes.CDLL(None), 0x20000, 0x44000, 0x1000
    if os.getuid() or libc.unshare(own_mounts) or libc.mount(b"none", b"/", None, private, None):
        print("without root's rights the name service is the machine's", flush=True)
        return
    silent.bind(("127.0.0.77", 53))
    config.write("nameserver 127.0.0.77\n")
    config.flush()
    assert libc.mount(config.name.encode(), b"/etc/resolv.conf", None, bind, None) == 0
    return silent, config


def descriptors():
    """What this process has open: sockets and pipes without their numbers."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
        except OSError:
            pass  # What listed them.
    return sorted(found)


def threads():
    return len(os.listdir("/proc/self/task"))


def a_connection_of_the_scripts_own(port, number):
    """Forms a group whose last rank comes late. What the others open while they wait for it is not the group's."""
    place = {"rank": number, "world_size": RANKS, "round": 1 << 20, "master_addr": "127.0.0.1", "master_port": port}
    group, opened = Group(place), []
    told = Store(place)

    def waits():
        if number < RANKS - 1 and not opened:
            opened.append(socket.create_connection(("127.0.0.1", port)))
            told.add("opened", 1)
        return False

    while number == RANKS - 1 and told.add("opened", 0) < RANKS - 1:
        time.sleep(0.01)
    group.join(timeout=30, outdated=waits)
    assert group.gather(number) == [0, 1, 2]
    group.close()
    for one in opened:
        # One that was shut down refuses this.
        one.sendall(b"x")
        one.close()


class Own:
    """The script's own server, and a connection to it."""

    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.client = socket.create_connection(self.server.getsockname())
        self.accepted = self.server.accept()[0]

    def is_whole(self):
        """Closes all of it. A connection that was shut down, and a server, refuse this."""
        self.client.sendall(b"x")
        assert self.accepted.recv(1) == b"x"
        late = socket.create_connection(self.server.getsockname())
        for one in (late, self.client, self.accepted, self.server):
            one.close()


def what_a_script_opens_while_gloo_connects(port, number):
    """Servers and connections of that moment are not the group's, either: not where it is cut before all ranks are there,
    and not where another thread begins to listen as gloo does."""
    place = {"rank": number, "world_size": RANKS, "round": 2 << 20, "master_addr": "127.0.0.1", "master_port": port}
    opened, busy, gloos = [], [], dist.ProcessGroupGloo

    class Slowly(gloos):
        def __init__(self, *arguments):
            opened.append(Own())
            super().__init__(*arguments)
            opened.append(Own())

        @staticmethod
        def create_default_device():
            busy.extend(Own() for _ in range(len(busy) < 30))
            return gloos.create_default_device()

    dist.ProcessGroupGloo = Slowly
    group = Group(place)
    group.join(timeout=30, outdated=lambda: False)
    assert group.gather(number) == [0, 1, 2]
    # Its own it knows, one to each peer.
    assert len(group._joined) == RANKS - 1, group._joined
    group.close()
    assert (len(opened), len(busy)) == (2, 30)

    def is_cut(self, *arguments):
        opened.append(Own())
        group.cut()
        raise RuntimeError("gloo's connections are cut")

    Slowly.__init__ = is_cut
    group = Group({**place, "round": place["round"] + 1})
    try:
        group.join(timeout=30, outdated=lambda: False)
    except GroupLost:
        group.close()
    dist.ProcessGroupGloo = gloos
    assert len(opened) == 3
    for one in opened + busy:
        one.is_whole()


def one_thread_serves_many(port, number):
    """One for all receivers of a state, and one for all who send it."""
    place = {"rank": number, "world_size": RANKS, "round": 5 << 20, "master_addr": "127.0.0.1", "master_port": port}
    group, begin, most = Group(place), threading.Thread.start, []

    def begins(thread):
        begin(thread)
        most.append(sum(one.name == "elastic-session-passage" for one in threading.enumerate()))

    group.join(timeout=30, outdated=lambda: False)
    threading.Thread.start = begins
    # A thread of many pieces lives long enough to be counted.
    value = {name: torch.full((1 << 22,), float(at)) for at, name in enumerate("abcd")}
    for holders, receivers in (([0], [1, 2]), ([0, 1], [2])):
        got = state.share(group, lambda: value, holders, receivers)
        assert (got is None) is (number in holders)
        assert got is None or all(torch.equal(one, value[name]) for name, one in got.items())
    threading.Thread.start = begin
    assert max(most) == 1, most
    group.close()


def a_mistake_is_no_lost_group(port, number):
    """What gloo cannot add, no later group can."""
    place = {"rank": number, "world_size": RANKS, "round": 3 << 20, "master_addr": "127.0.0.1", "master_port": port}
    group = Group(place)
    try:
        # Another rank may still be connecting when the first one finds out.
        group.join(timeout=30, outdated=lambda: False)
        group.finish(group.start_sum(torch.zeros(3, dtype=torch.int64 if number else torch.int16)))
    except RuntimeError as error:
        assert number == 0 and "Invalid scalar type" in str(error), error
    except GroupLost:
        assert number > 0
    else:
        raise AssertionError("gloo adds short numbers")
    group.close()


def no_room_for_a_thread_is_no_lost_group(port, number):
    """Every next group would meet that error again."""
    place = {"rank": number, "world_size": RANKS, "round": 4 << 20, "master_addr": "127.0.0.1", "master_port": port}
    group, pulse = Group(place), groups.Pulse
    if number == 0:
        groups.Pulse = lambda *_: threading.Thread.start(threading.current_thread())
    try:
        group.join(timeout=30, outdated=lambda: False)
        group.gather(number)
    except RuntimeError as error:
        assert number == 0 and "threads can only be started once" in str(error), error
    except GroupLost as lost:
        assert number > 0, lost
    else:
        raise AssertionError("it has no thread")
    groups.Pulse = pulse
    group.close()


def a_key_is_waited_for_as_long_as_asked(port):
    place = {"rank": 0, "world_size": 1, "round": 6 << 20, "master_addr": "127.0.0.1", "master_port": port}
    impatient, patient, other = Store(place), Store(place), Store(place)
    for one in (impatient, patient):
        one.set_timeout(datetime.timedelta(seconds=0.2))
    given_up = threading.Event()

    def sets():
        # Before the time for any other answer is over.
        given_up.wait(4)
        other.set("late", "here")

    setter = threading.Thread(target=sets)
    setter.start()
    ranks.refused("timed out", lambda: impatient.get("late"), dist.DistNetworkError)
    late = threading.Timer(0.6, given_up.set)
    late.start()
    patient.wait(["late"], datetime.timedelta(seconds=60))
    assert patient.get("late") == b"here"
    setter.join(), late.join()


def rank(port, rounds, seed, number):
    torch.set_num_threads(1)
    choose, lost, slowest = random.Random(seed), 0, 0.0
    a_connection_of_the_scripts_own(port, number)
    what_a_script_opens_while_gloo_connects(port, number)
    one_thread_serves_many(port, number)
    a_mistake_is_no_lost_group(port, number)
    no_room_for_a_thread_is_no_lost_group(port, number)
    before = descriptors(), threads()
    for round_ in range(rounds):
        # Every rank chooses alike.
        how, who = choose.choice(["whole", "left", "silent", "never"]), choose.randrange(RANKS)
        place = {"rank": number, "world_size": RANKS, "round": round_, "master_addr": "127.0.0.1", "master_port": port}
        group = Group(place)
        began = time.monotonic()
        try:
            if how == "never" and number == who:
                raise GroupLost("it does not come")
            # A rank that does not come is given up, as when the next round forms.
            group.join(timeout=10, outdated=lambda: how != "whole" and time.monotonic() > began + 0.1)
            tensor = torch.full((300_000,), float(number))
            if how in ("left", "silent") and number == who:
                if how == "left":
                    raise GroupLost("it leaves")
                # The others are cut out of their wait by another thread.
                time.sleep(0.1)
                raise GroupLost("it was silent")
            if how == "silent":
                threading.Timer(0.03, group.cut).start()
            group.finish(group.start_sum(tensor))
            assert how == "whole" and tensor[0] == sum(range(RANKS)), (how, tensor[0])
            assert group.gather(number * 7) == [0, 7, 14]
        except GroupLost as error:
            assert how != "whole", f"round {round_}: {error}"
            lost += 1
        finally:
            group.close()
        slowest = max(slowest, time.monotonic() - began)
    deadline = time.monotonic() + 45
    while (descriptors(), threads()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (descriptors(), threads()) == before, f"before {before}, after {(descriptors(), threads())}"
    print(f"rank {number}: {lost} of {rounds} groups were lost, the slowest took {slowest:.2f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}", flush=True)
    held = without_name_service()
    a_key_is_waited_for_as_long_as_asked(int(sys.argv[1]))
    ranks.run(RANKS, lambda number: rank(int(sys.argv[1]), int(sys.argv[2]), seed, number), seconds=200)
