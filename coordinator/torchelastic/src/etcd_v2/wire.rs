//! Requests as HTTP and answers out of JSON, as etcd 3.4's `Documentation/v2/api.md` and `errorcode.md` have them.

use bytes::Bytes;
use hyper::{Method, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use super::{Answer, Entry, News, Only, Refusal, Request};
use elastic_store::{Result, StoreError};

const MISSING: u32 = 100;
const DIFFERS: u32 = 101;
const EXISTS: u32 = 105;
const UNAUTHORIZED: u32 = 110;
const FORGOTTEN: u32 = 401;

/// Of raft, and while a leader is being elected: 300 and above.
const RAFT: std::ops::Range<u32> = 300..400;

const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const SEGMENTS: &AsciiSet = &UNRESERVED.remove(b'/');

/// An HTTP request without a host.
pub(super) struct HttpRequest {
    pub(super) method: Method,
    pub(super) path: String,
    /// A form, for PUT.
    pub(super) body: String,
}

pub(super) struct HttpReply {
    pub(super) status: u16,
    pub(super) cluster: Option<String>,
    pub(super) index: u64,
    pub(super) body: Bytes,
}

pub(super) fn get(path: &str, query: &str) -> HttpRequest {
    let path = if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") };
    HttpRequest { method: Method::GET, path, body: String::new() }
}

pub(super) fn path(key: &str) -> String {
    format!("/v2/keys{}", utf8_percent_encode(key, SEGMENTS))
}

fn encoded(value: &str) -> impl std::fmt::Display + '_ {
    utf8_percent_encode(value, UNRESERVED)
}

fn condition(only: &Only) -> Option<String> {
    Some(match only {
        Only::Always => return None,
        Only::Absent => "prevExist=false".into(),
        Only::Present => "prevExist=true".into(),
        Only::Value(value) => format!("prevValue={}", encoded(value)),
        Only::Index(index) => format!("prevIndex={index}"),
    })
}

pub(super) fn request(request: &Request) -> HttpRequest {
    let path = path(request.key());
    let put = |fields: Vec<String>| HttpRequest { method: Method::PUT, path: path.clone(), body: fields.join("&") };
    let lifetime = |ttl: &Option<u64>| ttl.map(|ttl| format!("ttl={ttl}"));
    match request {
        Request::Read { recursive, .. } => get(&path, &format!("quorum=true&recursive={recursive}")),
        Request::Put { value, ttl, only, .. } => {
            let mut fields = vec![format!("value={}", encoded(value))];
            fields.extend(lifetime(ttl));
            fields.extend(condition(only));
            put(fields)
        }
        Request::MakeDir { ttl, .. } => {
            let mut fields = vec!["dir=true".to_owned(), "prevExist=false".to_owned()];
            fields.extend(lifetime(ttl));
            put(fields)
        }
        Request::Refresh { dir, ttl, .. } => {
            let mut fields = vec![format!("ttl={ttl}"), "refresh=true".to_owned(), "prevExist=true".to_owned()];
            fields.extend(dir.then(|| "dir=true".to_owned()));
            put(fields)
        }
        Request::Delete { only, .. } => {
            let query = condition(only).map(|condition| format!("?{condition}")).unwrap_or_default();
            HttpRequest { method: Method::DELETE, path: format!("{path}{query}"), body: String::new() }
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    #[serde(default)]
    key: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    dir: bool,
    #[serde(default)]
    nodes: Vec<Node>,
    #[serde(default)]
    modified_index: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    #[serde(default)]
    action: String,
    node: Option<Node>,
    error_code: Option<u32>,
    #[serde(default)]
    message: String,
    #[serde(default)]
    cause: String,
    #[serde(default)]
    index: u64,
}

impl Node {
    fn entry(self) -> Entry {
        Entry {
            key: self.key,
            value: self.value,
            dir: self.dir,
            entries: self.nodes.into_iter().map(Node::entry).collect(),
            modified: self.modified_index,
        }
    }
}

impl HttpReply {
    pub(super) fn json(&self) -> Result<serde_json::Value, serde_json::Error> {
        serde_json::from_slice(&self.body)
    }

    /// What the answer to a long poll tells, if it tells of the keys.
    pub(super) fn news(&self) -> Option<News> {
        let body: Body = serde_json::from_slice(&self.body).ok()?;
        if body.error_code == Some(FORGOTTEN) {
            return Some(News::Forgotten);
        }
        let gone = matches!(body.action.as_str(), "delete" | "expire" | "compareAndDelete");
        Some(News::Change { gone, entry: body.node?.entry() })
    }

    /// Whether a member refused because it has no leader or lost it meanwhile: another try may be answered.
    pub(super) fn is_election(&self) -> Option<String> {
        let body: Body = serde_json::from_slice(&self.body).ok()?;
        let raft = body.error_code.is_some_and(|code| RAFT.contains(&code));
        raft.then(|| format!("{}: {}", body.message, body.cause))
    }

    pub(super) fn answer(self, endpoints: &str) -> Result<Answer> {
        let endpoints = endpoints.to_owned();
        if self.status == StatusCode::UNAUTHORIZED.as_u16() {
            let cause = "it wants a user and a password that may touch these keys".to_owned();
            return Err(StoreError::Denied { endpoints, cause });
        }
        let Ok(body) = serde_json::from_slice::<Body>(&self.body) else {
            let cause = format!("it answers with status {} and no JSON", self.status);
            return Err(StoreError::NotV2 { endpoints, cause });
        };
        let index = self.index.max(body.index);
        let outcome = match (body.error_code, body.node) {
            (None, Some(node)) => Ok(node.entry()),
            (Some(MISSING), _) => Err(Refusal::Missing),
            (Some(DIFFERS), _) => Err(Refusal::Differs),
            (Some(EXISTS), _) => Err(Refusal::Exists),
            (Some(UNAUTHORIZED), _) => return Err(StoreError::Denied { endpoints, cause: body.message }),
            (Some(code), _) => Err(Refusal::Other(code, format!("{}: {}", body.message, body.cause))),
            (None, None) => {
                let cause = format!("it answers with status {} and neither a node nor an error", self.status);
                return Err(StoreError::NotV2 { endpoints, cause });
            }
        };
        Ok(Answer { index, outcome })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(status: u16, body: &'static str) -> HttpReply {
        HttpReply { status, cluster: None, index: 7, body: Bytes::from_static(body.as_bytes()) }
    }

    #[test]
    fn requests_are_what_python_etcd_sends() {
        // As recorded from python-etcd 0.4.5.
        let put = |request: Request| {
            let call = super::request(&request);
            (call.method.to_string(), call.path, call.body)
        };
        let key = "/torchelastic/p2p/run_J/rdzv/active_version".to_owned();
        let at = format!("/v2/keys{key}");
        assert_eq!(
            put(Request::Put { key: key.clone(), value: "{\"a\": 1}".into(), ttl: Some(5), only: Only::Absent }),
            ("PUT".into(), at.clone(), "value=%7B%22a%22%3A%201%7D&ttl=5&prevExist=false".into())
        );
        assert_eq!(
            put(Request::Put { key: key.clone(), value: "x+y".into(), ttl: None, only: Only::Value("&=".into()) }),
            ("PUT".into(), at.clone(), "value=x%2By&prevValue=%26%3D".into())
        );
        assert_eq!(
            put(Request::Refresh { key: key.clone(), dir: true, ttl: 7200 }).2,
            "ttl=7200&refresh=true&prevExist=true&dir=true"
        );
        assert_eq!(
            put(Request::Delete { key, only: Only::Value("a b".into()) }),
            ("DELETE".into(), format!("{at}?prevValue=a%20b"), String::new())
        );
        assert_eq!(path("/p/run_a:b+c/v_1/kv/TUFT=="), "/v2/keys/p/run_a%3Ab%2Bc/v_1/kv/TUFT%3D%3D");
    }

    #[test]
    fn answers_are_read() {
        // As recorded from etcd 3.4.23.
        let made = reply(201, r#"{"action":"set","node":{"key":"/a","value":"1","modifiedIndex":4,"createdIndex":4}}"#);
        let entry = Entry { key: "/a".into(), value: "1".into(), modified: 4, ..Entry::default() };
        assert_eq!(made.answer("here"), Ok(Answer { index: 7, outcome: Ok(entry) }));
        let refusals = [
            (404, r#"{"errorCode":100,"message":"Key not found","cause":"/zz","index":4}"#, Refusal::Missing),
            (412, r#"{"errorCode":101,"message":"Compare failed","cause":"[5 != 1]","index":4}"#, Refusal::Differs),
            (412, r#"{"errorCode":105,"message":"Key already exists","cause":"/a","index":4}"#, Refusal::Exists),
            (
                403,
                r#"{"errorCode":102,"message":"Not a file","cause":"/d","index":8}"#,
                Refusal::Other(102, "Not a file: /d".into()),
            ),
        ];
        for (status, body, refusal) in refusals {
            assert_eq!(reply(status, body).answer("here").unwrap().outcome, Err(refusal));
        }
        let forgotten = r#"{"errorCode":401,"message":"The event in requested index is outdated and cleared",
            "cause":"the requested history has been cleared [1010/4]","index":2009}"#;
        assert_eq!(reply(400, forgotten).news(), Some(News::Forgotten));
        let expired = r#"{"action":"expire","node":{"key":"/d/x","modifiedIndex":8,"createdIndex":7},
            "prevNode":{"key":"/d/x","value":"1"}}"#;
        let entry = Entry { key: "/d/x".into(), modified: 8, ..Entry::default() };
        assert_eq!(reply(200, expired).news(), Some(News::Change { gone: true, entry }));
    }

    #[test]
    fn an_election_differs_from_a_server_without_v2() {
        let election =
            r#"{"errorCode":300,"message":"Raft Internal Error","cause":"etcdserver: request timed out","index":4}"#;
        assert!(reply(500, election).is_election().unwrap().contains("timed out"));
        assert!(reply(200, r#"{"action":"get","node":{"key":"/"}}"#).is_election().is_none());
        assert!(matches!(reply(404, "404 page not found").answer("here"), Err(StoreError::NotV2 { .. })));
        assert!(matches!(
            reply(401, r#"{"message":"Insufficient credentials"}"#).answer("x"),
            Err(StoreError::Denied { .. })
        ));
    }
}
