//! Bytes recorded between real clients and torch's own server: a client that sends the bytes on the left gets the bytes
//! on the right from our server.

use super::{WorkersStoreLimits, serve};

fn bytes(hex: &str) -> Vec<u8> {
    let hex: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    hex.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn replay(conversation: &[(&str, &str, &str)]) {
    let store = serve(WorkersStoreLimits::default());
    let mut client = store.connect();
    for (what, sent, answered) in conversation {
        let answer = bytes(answered);
        assert_eq!(client.ask(&bytes(sent), answer.len()), answer, "{what}");
    }
}

#[test]
fn torch_2_15() {
    replay(&[
        ("connect", "00cef7853c 0d5c150000", "5c150000"),
        ("set k v", "01 0200000000000000 2f6b 0100000000000000 76", ""),
        ("get k: wait", "06 0100000000000000 0200000000000000 2f6b", "00"),
        ("get k", "03 0200000000000000 2f6b", "0100000000000000 76"),
        ("add n 5", "04 0200000000000000 2f6e 0500000000000000", "0500000000000000"),
        ("compare k v w", "02 0200000000000000 2f6b 0100000000000000 76 0100000000000000 77", "0100000000000000 77"),
        ("compare zz a b", "02 0300000000000000 2f7a7a 0100000000000000 61 0100000000000000 62", "0100000000000000 61"),
        ("wait k n", "06 0200000000000000 0200000000000000 2f6b 0200000000000000 2f6e", "00"),
        ("wait nope, then give up", "06 0100000000000000 0500000000000000 2f6e6f7065 0c", "01"),
        ("set k2 v", "01 0300000000000000 2f6b32 0100000000000000 76", ""),
        ("num_keys", "07", "0300000000000000"),
        ("delete_key k", "08 0200000000000000 2f6b", "0100000000000000"),
        ("check k n", "05 0200000000000000 0200000000000000 2f6b 0200000000000000 2f6e", "01"),
        ("append a xy", "09 0200000000000000 2f61 0200000000000000 7879", ""),
        (
            "multi_set a 1, b 2",
            "0b 0200000000000000 0200000000000000 2f61 0100000000000000 31 0200000000000000 2f62 \
             0100000000000000 32",
            "",
        ),
        (
            "multi_get a b",
            "0a 0200000000000000 0200000000000000 2f61 0200000000000000 2f62",
            "0100000000000000 31 0100000000000000 32",
        ),
        ("queue_push q 1", "0e 0200000000000000 2f71 0100000000000000 31", ""),
        ("queue_len q", "10 0200000000000000 2f71", "0100000000000000"),
        ("queue_pop q", "0f 0200000000000000 2f71", "0100000000000000 0100000000000000 31"),
        ("queue_pop q, empty", "0f 0200000000000000 2f71", "0000000000000000"),
        ("barrier bar 1", "12 0400000000000000 2f626172 0100000000000000", "00"),
        ("barrier bar 9, then give up", "12 0400000000000000 2f626172 0900000000000000 0c", "01"),
        ("its counter", "03 0400000000000000 2f626172", "0100000000000000 32"),
        ("get of a missing key", "03 0200000000000000 2f78", "0000000000000000"),
    ]);
}

#[test]
fn torch_1_13() {
    replay(&[
        ("set k v", "00 0200000000000000 2f6b 0100000000000000 76", ""),
        ("get k: wait", "05 0100000000000000 0200000000000000 2f6b", "00"),
        ("get k", "02 0200000000000000 2f6b", "0100000000000000 76"),
        ("add n 5", "03 0200000000000000 2f6e 0500000000000000", "0500000000000000"),
        ("compare k v w", "01 0200000000000000 2f6b 0100000000000000 76 0100000000000000 77", "0100000000000000 77"),
        ("compare zz a b", "01 0300000000000000 2f7a7a 0100000000000000 61 0100000000000000 62", "0100000000000000 61"),
        ("wait k n", "05 0200000000000000 0200000000000000 2f6b 0200000000000000 2f6e", "00"),
        ("wait nope, and give up without a word", "05 0100000000000000 0500000000000000 2f6e6f7065", ""),
        ("set k2 v", "00 0300000000000000 2f6b32 0100000000000000 76", ""),
        ("num_keys", "06", "0300000000000000"),
        ("delete_key k", "08 0200000000000000 2f6b", "0100000000000000"),
    ]);
}

#[test]
fn old_and_new_clients_share_a_store() {
    let store = serve(WorkersStoreLimits::default());
    let (mut old, mut new) = (store.connect(), store.client());
    old.say(&bytes("05 0100000000000000 0200000000000000 2f6b"));
    new.say(&super::set("/k", b"v"));
    assert_eq!(old.hear(1), [0]);
}
