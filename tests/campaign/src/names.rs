//! A name server that answers, fails, is late, or is wrong.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::PoisonError;

use anyhow::{Context, Result};
use elastic_tests::prelude::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answers {
    Right,
    /// With `SERVFAIL`.
    Failure,
    /// With `NXDOMAIN`: there is no such name.
    Unknown,
    /// Not at all.
    None,
    Late(Duration),
    /// With an address that no host has.
    Wrong,
}

/// Serves names on port 53 of all of this namespace's addresses, for as long as the process lives.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    answers: Arc<Mutex<Answers>>,
}

const NOBODY: Ipv4Addr = Ipv4Addr::new(10, 88, 250, 2);

impl Names {
    pub(crate) fn serve(known: BTreeMap<String, Ipv4Addr>) -> Result<Names> {
        let socket = UdpSocket::bind("0.0.0.0:53").context("serve names")?;
        let names = Names { answers: Arc::new(Mutex::new(Answers::Right)) };
        let answers = Arc::clone(&names.answers);
        std::thread::Builder::new().name("names".into()).spawn(move || {
            let mut buffer = [0; 512];
            while let Ok((length, client)) = socket.recv_from(&mut buffer) {
                let mode = *answers.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(reply) = reply(&buffer[..length], mode, &known) else { continue };
                match mode {
                    Answers::None => {}
                    Answers::Late(delay) => later(&socket, reply, client, delay),
                    _ => drop(socket.send_to(&reply, client)),
                }
            }
        })?;
        Ok(names)
    }

    /// From now on it answers like this.
    pub(crate) fn answer(&self, answers: Answers) {
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner) = answers;
    }
}

fn later(socket: &UdpSocket, reply: Vec<u8>, client: SocketAddr, delay: Duration) {
    let Ok(socket) = socket.try_clone() else { return };
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        let _ = socket.send_to(&reply, client);
    });
}

/// The answer to a query of one question, by RFC 1035, section 4.1.
fn reply(query: &[u8], mode: Answers, known: &BTreeMap<String, Ipv4Addr>) -> Option<Vec<u8>> {
    const HEADER: usize = 12;
    let (mut at, mut labels) = (HEADER, Vec::new());
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(query.get(at..at + length)?).to_lowercase());
        at += length;
    }
    let asks_for_v4 = query.get(at..at + 2)? == [0, 1];
    let question = query.get(HEADER..at + 4)?;
    let name = labels.first().map(String::as_str).unwrap_or_default();
    let address = if mode == Answers::Wrong { Some(NOBODY) } else { known.get(name).copied() };
    let code = match (mode, address) {
        (Answers::Failure, _) => 2,
        (Answers::Unknown, _) | (_, None) => 3,
        _ => 0,
    };
    let address = address.filter(|_| code == 0 && asks_for_v4);
    let mut reply = query.get(..2)?.to_vec();
    reply.extend([0x84, code, 0, 1, 0, u8::from(address.is_some()), 0, 0, 0, 0]);
    reply.extend(question);
    if let Some(address) = address {
        // A pointer to the question's name, type A, class IN, good for no time at all, four bytes.
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        reply.extend(address.octets());
    }
    Some(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_name_is_answered_and_an_unknown_one_is_not() {
        let known = BTreeMap::from([("etcd0".to_owned(), Ipv4Addr::new(10, 88, 10, 2))]);
        let query = |name: &str| {
            let mut query = vec![7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, name.len() as u8];
            query.extend(name.as_bytes());
            query.extend([0, 0, 1, 0, 1]);
            query
        };
        let answer = reply(&query("etcd0"), Answers::Right, &known).unwrap();
        assert_eq!((answer[3], answer[7]), (0, 1));
        assert!(answer.ends_with(&[10, 88, 10, 2]));
        let answer = reply(&query("etcd9"), Answers::Right, &known).unwrap();
        assert_eq!((answer[3], answer[7]), (3, 0));
        let answer = reply(&query("etcd0"), Answers::Failure, &known).unwrap();
        assert_eq!((answer[3], answer[7]), (2, 0));
        assert_eq!(reply(&[0; 5], Answers::Right, &known), None);
    }
}
