//! Error files, as torch writes and reads them. A worker writes one under `TORCHELASTIC_ERROR_FILE`. The agent writes
//! its own one for a program that started the agent and wants the job's root cause in the same form.
//!
//! Python's `@record` writes `{"message": {"message": …, "extraInfo": {"py_callstack": …, "timestamp": "…"}}}`. C++
//! writes `{"message": "…", …}` (torch/distributed/elastic/multiprocessing/errors).

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use elastic_rendezvous::job::Failure;
use serde_json::{Value, json};

/// The largest error file that is read, in bytes. A larger file is no error report.
const LIMIT: u64 = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub message: String,
    pub traceback: Option<String>,
}

impl Recorded {
    /// Reads an error file. `None` if there is none, or if it is unreadable, cut short, too large, or of another shape.
    /// That is no error, because a worker's report is one source among several.
    pub(crate) fn read(path: &Path) -> Option<Recorded> {
        // A pipe of this name must not block the agent.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
        let metadata = file.metadata().ok()?;
        if !metadata.is_file() || metadata.len() > LIMIT {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(LIMIT).read_to_end(&mut bytes).ok()?;
        Recorded::parse(&bytes)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Recorded> {
        let json: Value = serde_json::from_slice(bytes).ok()?;
        let message = json.get("message")?;
        if let Some(text) = message.as_str() {
            // A message of several lines also says where the failure happened.
            let traceback = text.trim().contains('\n').then(|| text.to_owned());
            return Some(Recorded { message: text.to_owned(), traceback }).filter(Recorded::says_something);
        }
        let callstack = message.get("extraInfo").and_then(|extra| extra.get("py_callstack")).and_then(Value::as_str);
        let traceback = callstack.filter(|text| !text.trim().is_empty()).map(str::to_owned);
        let recorded = Recorded { message: message.get("message")?.as_str()?.to_owned(), traceback };
        Some(recorded).filter(Recorded::says_something)
    }

    fn says_something(&self) -> bool {
        !self.message.trim().is_empty()
    }
}

/// Writes the root cause to the file that the agent's own `TORCHELASTIC_ERROR_FILE` names, as torchrun does. The shape
/// is that of `@record`, with the worker's exit code as `errorCode`, and in `extraInfo` which worker it was.
pub(crate) fn hand_up(cause: &Failure, path: &Path) -> io::Result<()> {
    let callstack = cause.traceback.clone().unwrap_or_else(|| cause.stderr.join("\n"));
    let seconds = cause.at_ms.unwrap_or_default() / 1000;
    let mut message = json!({
        "message": cause.message,
        "extraInfo": { "py_callstack": callstack, "timestamp": seconds.to_string(), "rank": cause.rank,
                       "local_rank": cause.local_rank, "pid": cause.pid },
    });
    if let Some(code) = cause.exit_code {
        message["errorCode"] = json!(code);
    }
    std::fs::write(path, json!({ "message": message }).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use elastic_rendezvous::job::FailureClass;
    use proptest::prelude::*;

    fn recorded(message: &str, traceback: Option<&str>) -> Option<Recorded> {
        Some(Recorded { message: message.to_owned(), traceback: traceback.map(str::to_owned) })
    }

    #[test]
    fn both_shapes_are_read() {
        let python = br#"{"message":{"message":"ValueError: boom","extraInfo":{"py_callstack":"Traceback: x",
            "timestamp":"1795210355"}}}"#;
        assert_eq!(Recorded::parse(python), recorded("ValueError: boom", Some("Traceback: x")));
        let bare = br#"{"message":{"message":"ValueError: boom"}}"#;
        assert_eq!(Recorded::parse(bare), recorded("ValueError: boom", None));
        let cpp = br#"{"message":"std::bad_alloc","errorCode":6,"timestamp":1795210355}"#;
        assert_eq!(Recorded::parse(cpp), recorded("std::bad_alloc", None));
        assert_eq!(Recorded::parse(br#"{"message":"a\nb"}"#), recorded("a\nb", Some("a\nb")));
    }

    #[test]
    fn what_is_no_report_is_passed_over() {
        let deep = "[".repeat(100_000);
        for text in ["", "{", "[]", "null", r#"{"message":7}"#, r#"{"message":{}}"#, r#"{"message":" "}"#, &deep] {
            assert_eq!(Recorded::parse(text.as_bytes()), None, "{text:.20}");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("error.json");
        assert_eq!(Recorded::read(&path), None);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(Recorded::read(&path), None, "a pipe is not waited for");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, format!("{{\"message\":\"{}\"}}", "x".repeat(LIMIT as usize))).unwrap();
        assert_eq!(Recorded::read(&path), None, "more than anybody reads");
    }

    #[test]
    fn what_is_handed_up_can_be_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("error.json");
        let cause = Failure {
            rank: Some(3),
            exit_code: Some(-9),
            at_ms: Some(1_795_210_355_999),
            traceback: Some("Traceback: x".into()),
            ..Failure::new(FailureClass::Own, "ValueError: boom")
        };
        hand_up(&cause, &path).unwrap();
        assert_eq!(Recorded::read(&path), recorded("ValueError: boom", Some("Traceback: x")));
        let json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(json["message"]["errorCode"], -9);
        let extra = &json["message"]["extraInfo"];
        assert_eq!(
            (&extra["timestamp"], &extra["rank"], &extra["pid"]),
            (&"1795210355".into(), &3.into(), &Value::Null)
        );
    }

    proptest! {
        #[test]
        fn no_bytes_do_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            Recorded::parse(&bytes);
        }
    }
}
