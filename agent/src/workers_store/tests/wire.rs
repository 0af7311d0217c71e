//! A conversation decodes to the same requests however its bytes are split.

use proptest::prelude::*;

use super::{HELLO, get, request, set, string, wait};
use crate::workers_store::wire::{Decoder, MAX_KEY, MAX_KEYS, MAX_VALUE, Malformed};

/// The decoded requests as text, if the bytes arrive in pieces of these lengths.
fn decode(bytes: &[u8], pieces: impl IntoIterator<Item = usize>) -> Result<Vec<String>, Malformed> {
    let (mut decoder, mut requests, mut rest) = (Decoder::default(), Vec::new(), bytes);
    let mut pieces = pieces.into_iter();
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(pieces.next().unwrap_or(rest.len()).min(rest.len()));
        decoder.feed::<Malformed>(piece, |request| {
            requests.push(format!("{request:?}"));
            Ok(())
        })?;
        rest = after;
    }
    assert_eq!(decoder.held(), 0, "a whole conversation leaves nothing behind");
    Ok(requests)
}

/// One request of every operation.
fn every_operation() -> Vec<u8> {
    let (key, value, int) = (string("/key"), string("value"), 7_i64.to_le_bytes());
    let two = 2_u64.to_le_bytes();
    [
        HELLO.to_vec(),
        request(13, &[&[1, 2, 3, 4]]),
        set("/key", b"value"),
        set("", b""),
        request(2, &[&key, &value, &value]),
        get("/key"),
        request(4, &[&key, &int]),
        request(5, &[&two, &key, &key]),
        wait(&["/key", "", "/other"]),
        wait(&[]),
        request(7, &[]),
        request(8, &[&key]),
        request(9, &[&key, &value]),
        request(10, &[&two, &key, &key]),
        request(11, &[&two, &key, &value, &key, &value]),
        request(12, &[]),
        request(14, &[&key, &value]),
        request(15, &[&key]),
        request(16, &[&key]),
        request(17, &[]),
        request(18, &[&key, &int]),
    ]
    .concat()
}

#[test]
fn a_conversation_can_be_split_at_every_byte() {
    let bytes = every_operation();
    let whole = decode(&bytes, []).unwrap();
    assert_eq!(whole.len(), 20);
    for at in 1..bytes.len() {
        assert_eq!(decode(&bytes, [at]).unwrap(), whole, "split at {at}");
    }
    assert_eq!(decode(&bytes, std::iter::repeat(1)).unwrap(), whole, "byte by byte");
}

#[test]
fn an_old_conversation_can_be_split_at_every_byte() {
    let key = string("/k");
    let bytes =
        [request(0, &[&key, &string("v")]), request(5, &[&1_u64.to_le_bytes(), &key]), request(6, &[])].concat();
    let whole = decode(&bytes, []).unwrap();
    assert_eq!(whole.len(), 3);
    for at in 1..bytes.len() {
        assert_eq!(decode(&bytes, [at]).unwrap(), whole, "split at {at}");
    }
}

#[test]
fn lengths_and_numbers_beyond_torchs_are_refused_before_their_bytes_come() {
    let long = |n: u64| n.to_le_bytes();
    let new = |op: u8, fields: &[&[u8]]| decode(&[&HELLO[..], &request(op, fields)].concat(), []);
    assert_eq!(new(3, &[&long(MAX_KEY + 1)]), Err(Malformed::Key(MAX_KEY + 1)));
    assert_eq!(new(3, &[&long(u64::MAX)]), Err(Malformed::Key(u64::MAX)));
    assert_eq!(new(1, &[&string("/k"), &long(MAX_VALUE + 1)]), Err(Malformed::Value(MAX_VALUE + 1)));
    assert_eq!(new(1, &[&string("/k"), &long(u64::MAX)]), Err(Malformed::Value(u64::MAX)));
    for op in [5, 6, 10, 11] {
        assert_eq!(new(op, &[&long(MAX_KEYS + 1)]), Err(Malformed::Keys(MAX_KEYS + 1)));
    }
    // VALIDATE may come only once, at the beginning. In the old dialect, operation 7 is not supported.
    for op in [0, 19, 255] {
        assert_eq!(new(op, &[]), Err(Malformed::Operation(op)));
    }
    assert_eq!(decode(&[7], []), Err(Malformed::Operation(7)));
}

proptest! {
    #[test]
    fn pieces_do_not_matter(pieces in prop::collection::vec(1_usize..40, 0..60)) {
        let bytes = every_operation();
        prop_assert_eq!(decode(&bytes, pieces), decode(&bytes, []));
    }

    /// Decoding must not panic, nor hold more memory than there were bytes.
    #[test]
    fn any_bytes_are_requests_or_refused(mut bytes: Vec<u8>, greeted: bool, pieces in prop::collection::vec(1_usize..9, 0..30)) {
        if greeted {
            bytes.splice(0..0, HELLO);
        }
        let (mut decoder, mut rest) = (Decoder::default(), &bytes[..]);
        for piece in pieces {
            let (now, after) = rest.split_at(piece.min(rest.len()));
            if decoder.feed::<Malformed>(now, |_| Ok(())).is_err() {
                break;
            }
            prop_assert!(decoder.held() <= 2 * bytes.len().max(8));
            rest = after;
        }
    }
}
