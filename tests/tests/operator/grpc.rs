//! The coordinator's gRPC API, by a client of another program. Who may call what is in `users`, with the JSON API's
//! table.

use elastic_proto::jobs::ask_request::Wish;
use elastic_proto::jobs::jobs_client::JobsClient;
use elastic_proto::jobs::{
    AskRequest, Close, DeleteRequest, Drain, DropCheckpointRequest, EventsRequest, Evict, Exclude, GetRequest, Include,
    JobState, JobSummary, ListRequest, MeRequest, Pause, Resume, Set, Undrain, Via, WatchAllRequest, WatchReply,
    WatchRequest,
};
use elastic_tests::prelude::*;
use tokio::time::timeout;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use super::retention::{ended, write};
use super::users::{Served, token};
use super::{Scene, WITHIN, http, succeed};

/// A call on the job `train`, as the table of the JSON API's calls has it.
#[derive(Debug, Clone)]
pub(super) enum Rpc {
    Me,
    List,
    Get,
    Events,
    Watch,
    WatchAll,
    Ask(Option<Wish>),
    Delete,
    DropCheckpoint,
    Unknown,
}

impl Rpc {
    /// Asks; of a watch for its first message alone.
    pub(super) async fn by(self, token: Option<&str>, channel: Channel) -> Result<(), Status> {
        let mut jobs = JobsClient::new(channel.clone());
        let job = || "train".to_owned();
        match self {
            Rpc::Me => jobs.me(with(token, MeRequest {})).await.map(drop),
            Rpc::List => jobs.list(with(token, ListRequest::default())).await.map(drop),
            Rpc::Get => jobs.get(with(token, GetRequest { job: job() })).await.map(drop),
            Rpc::Events => jobs.events(with(token, EventsRequest { job: job(), after: 0, limit: 0 })).await.map(drop),
            Rpc::Watch => next(&mut jobs.watch(with(token, watch(0))).await?.into_inner()).await.map(drop),
            Rpc::WatchAll => {
                next(&mut jobs.watch_all(with(token, WatchAllRequest {})).await?.into_inner()).await.map(drop)
            }
            Rpc::Ask(wish) => jobs.ask(with(token, AskRequest { job: job(), wish })).await.map(drop),
            Rpc::Delete => jobs.delete(with(token, DeleteRequest { job: job(), dry_run: false })).await.map(drop),
            Rpc::DropCheckpoint => {
                jobs.drop_checkpoint(with(token, DropCheckpointRequest { job: job() })).await.map(drop)
            }
            Rpc::Unknown => {
                let mut raw = tonic::client::Grpc::new(channel);
                raw.ready().await.unwrap();
                let codec = tonic_prost::ProstCodec::<MeRequest, MeRequest>::default();
                let path = "/elastic.jobs.v1.Jobs/Nothing".parse().unwrap();
                raw.unary(with(token, MeRequest {}), path, codec).await.map(drop)
            }
        }
    }
}

/// A wish of the table about a node.
macro_rules! of_node {
    ($($name:ident = $wish:ident),*) => {$(
        pub(super) fn $name(node: &str) -> Rpc {
            Rpc::Ask(Some(Wish::$wish($wish { node: node.into() })))
        }
    )*};
}

of_node!(drain = Drain, undrain = Undrain, exclude = Exclude, include = Include, evict = Evict);

pub(super) fn set(min: Option<u32>, max: Option<u32>) -> Rpc {
    Rpc::Ask(Some(Wish::Set(Set { min, max, priority: None })))
}

pub(super) fn pause() -> Rpc {
    Rpc::Ask(Some(Wish::Pause(Pause {})))
}

pub(super) fn resume() -> Rpc {
    Rpc::Ask(Some(Wish::Resume(Resume {})))
}

pub(super) fn close() -> Rpc {
    Rpc::Ask(Some(Wish::Close(Close {})))
}

/// A message, in the name of whose token this is.
fn with<T>(token: Option<&str>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
    }
    request
}

fn watch(after: u64) -> WatchRequest {
    WatchRequest { job: "train".into(), after }
}

async fn next<T>(stream: &mut Streaming<T>) -> Result<T, Status> {
    let message = timeout(WITHIN, stream.message()).await.expect("a message or an end");
    Ok(message?.expect("a watch has no end but an error"))
}

pub(super) async fn channel(url: &str) -> Channel {
    Endpoint::from_shared(url.to_owned()).unwrap().connect().await.unwrap()
}

fn code<T: std::fmt::Debug>(answer: Result<T, Status>) -> (Code, String) {
    let status = answer.expect_err("a refusal");
    (status.code(), status.message().to_owned())
}

/// What gRPC leaves out is left out.
fn bare(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let is_default = |value: &Value| {
                value.is_null() || *value == false || *value == "" || value.as_f64() == Some(0.0) || *value == json!([])
            };
            let fields = fields.into_iter().map(|(name, value)| (name, bare(value)));
            Value::Object(fields.filter(|(_, value)| !is_default(value)).collect())
        }
        Value::Array(values) => Value::Array(values.into_iter().map(bare).collect()),
        other => other,
    }
}

async fn same<T: serde::Serialize>(page: &str, path: &str, grpc: impl AsyncFn() -> Result<tonic::Response<T>, Status>) {
    let json = async || {
        let answer = http(page, path).await;
        bare(serde_json::from_str(answer.split_once("\r\n\r\n").expect("a body").1).unwrap())
    };
    let (grpc, json) = eventually(&format!("{path} does not change meanwhile"), WITHIN, async || {
        let before = json().await;
        let told = grpc().await.unwrap().into_inner();
        (json().await == before).then(|| (bare(serde_json::to_value(told).unwrap()), before))
    })
    .await;
    assert_eq!(grpc, json, "{path}");
}

#[tokio::test]
async fn both_apis_tell_the_same_of_a_live_job() {
    let (_coordinator, page, scene) = Scene::embedded(1, 2).await;
    let [mut a, b] = scene.nodes(["a", "b"]).await;
    let spare = scene.node("c").await;
    b.fail(FailureClass::Own, "ValueError: boom");
    a.runs(2, 2, WITHIN).await.unwrap();
    scene.ctl_ok(&["set", "train", "--priority", "3"]).await;
    let progress = r#"{"generation":1,"round":2,"step":1200,"total_steps":5000,"epoch":3,"loss":2.5,
        "steps_per_second":4.125,"furthest_step":1300,"since_ms":1000000,"at_ms":1400000,"productive_ms":300000}"#;
    scene.store.put(vec![], Op::put(scene.keys.progress(), progress)).await.unwrap();
    eventually("all of it is known there", WITHIN, async || {
        let job = http(&page, "/v1/jobs/train").await;
        let waits = r#"a spare: the round has all 2 nodes"#;
        [waits, r#""step":1200"#, r#""priority":3"#].iter().all(|part| job.contains(part)).then_some(())
    })
    .await;

    let jobs = JobsClient::new(channel(&format!("http://{page}")).await);
    let id = || "train".to_owned();
    same(&page, "/v1/jobs", async || jobs.clone().list(ListRequest::default()).await).await;
    same(&page, "/v1/jobs/train", async || jobs.clone().get(GetRequest { job: id() }).await).await;
    same(&page, "/v1/jobs/train/events", async || {
        jobs.clone().events(EventsRequest { job: id(), after: 0, limit: 0 }).await
    })
    .await;
    same(&page, "/v1/jobs/train/events?after=1&limit=1", async || {
        jobs.clone().events(EventsRequest { job: id(), after: 1, limit: 1 }).await
    })
    .await;
    for (state, count) in [(JobState::Running, 1), (JobState::Failed, 0)] {
        let listing = ListRequest { state: state.into(), ..ListRequest::default() };
        assert_eq!(jobs.clone().list(listing).await.unwrap().into_inner().jobs.len(), count, "{state:?}");
    }
    let after = ListRequest { after: id(), ..ListRequest::default() };
    assert_eq!(jobs.clone().list(after).await.unwrap().into_inner().jobs, []);
    let unknown = ListRequest { state: 99, ..ListRequest::default() };
    assert_eq!(code(jobs.clone().list(unknown).await), (Code::InvalidArgument, "there is no state 99".into()));

    // Who has no users' file lets no one change anything.
    let (refused, why) = code(close().by(None, channel(&format!("http://{page}")).await).await);
    assert!(refused == Code::PermissionDenied && why.contains("this port only reads"), "{refused} {why}");
    drop(spare);
    drop((a, b));
}

#[tokio::test]
async fn a_watch_reports_the_present_state_and_then_each_change() {
    let (operator, line) = token("olga", &["--role", "operate"]).await;
    let mut served = Served::start(&[&line]).await;
    let mut jobs = JobsClient::new(channel(&served.url).await);
    let olga = Some(&*operator);
    let mut train = jobs.watch(with(olga, watch(0))).await.unwrap().into_inner();
    let mut all = jobs.watch_all(with(olga, WatchAllRequest {})).await.unwrap().into_inner();
    let first = next(&mut train).await.unwrap();
    let job = first.job.as_ref().unwrap();
    assert_eq!((job.state(), job.nodes.len(), &job.desired), (JobState::Running, 2, &None));
    assert_eq!(first.events.last().map(|event| event.number), Some(first.next), "the history until now");
    let listed = next(&mut all).await.unwrap();
    assert_eq!((listed.jobs.len(), listed.more, listed.gone.len()), (1, false, 0));

    // Asked for through the same API, told with who asked.
    let drain = AskRequest { job: "train".into(), wish: Some(Wish::Drain(Drain { node: "b".into() })) };
    let answer = jobs.ask(with(olga, drain)).await.unwrap().into_inner();
    assert_eq!((answer.desired.unwrap().drain, answer.advice), (vec!["b".to_owned()], None));
    let mut events = Vec::new();
    let mut tell = |told: WatchReply| {
        events.extend(told.events);
        (told.job.unwrap(), told.next)
    };
    tell(first);
    let (mut job, mut last) = tell(next(&mut train).await.unwrap());
    while job.nodes.len() > 1 || job.state() != JobState::Running {
        (job, last) = tell(next(&mut train).await.unwrap());
    }
    served.nodes[0].runs(2, 1, WITHIN).await.unwrap();
    let numbers: Vec<u64> = events.iter().map(|event| event.number).collect();
    assert!(numbers.windows(2).all(|two| two[0] + 1 == two[1]), "each line once, in order: {numbers:?}");
    let asked = events.iter().find_map(|event| Some((&event.reason, event.asked_by.as_ref()?))).unwrap();
    assert_eq!((&asked.1.name[..], asked.1.via()), ("olga", Via::Api));
    assert!(asked.0.contains("drain b"), "{asked:?}");

    // Another watch continues where this one is.
    let mut again = jobs.watch(with(olga, watch(last))).await.unwrap().into_inner();
    let resumed = next(&mut again).await.unwrap();
    assert!(resumed.events.iter().all(|event| event.number > last) && resumed.job.is_some(), "{resumed:?}");
    // A number that the history has not reached is of a job of this id that was deleted.
    let mut anew = jobs.watch(with(olga, watch(9_999))).await.unwrap().into_inner();
    assert_eq!(next(&mut anew).await.unwrap().events.first(), events.first());
    let mut seen: Option<JobSummary> = None;
    while seen.as_ref().is_none_or(|job| job.nodes != 1 || job.state() != JobState::Running) {
        seen = next(&mut all).await.unwrap().jobs.pop().or(seen);
    }
    drop(served.nodes);
}

#[tokio::test]
async fn a_job_that_has_ended_is_deleted_and_its_watches_hear_of_it() {
    let (operator, line) = token("olga", &["--role", "operate"]).await;
    let served = Served::start(&[&line]).await;
    let mut jobs = JobsClient::new(channel(&served.url).await);
    let olga = Some(&*operator);
    let mut all = jobs.watch_all(with(olga, WatchAllRequest {})).await.unwrap().into_inner();
    next(&mut all).await.unwrap();
    write(&*served.scene.store, &ended("old", 2, 0)).await;
    let old = || "old".to_owned();
    while !next(&mut all).await.unwrap().jobs.iter().any(|job| job.job == "old") {}
    let mut watch = jobs.watch(with(olga, WatchRequest { job: old(), after: 0 })).await.unwrap().into_inner();
    next(&mut watch).await.unwrap();

    let drop_checkpoint = with(olga, DropCheckpointRequest { job: old() });
    let dropped = jobs.drop_checkpoint(drop_checkpoint).await.unwrap().into_inner();
    assert_eq!(dropped.dropped.map(|checkpoint| checkpoint.step), Some(7));
    while next(&mut watch).await.unwrap().job.unwrap().checkpoint.is_some() {}
    let mut delete =
        async |dry_run| jobs.delete(with(olga, DeleteRequest { job: old(), dry_run })).await.unwrap().into_inner();
    let (would, done) = (delete(true).await, delete(false).await);
    assert_eq!((would.keys, would.deleted, done.keys, done.deleted), (done.keys, false, would.keys, true));
    let end = loop {
        if let Err(end) = next(&mut watch).await {
            break end;
        }
    };
    assert_eq!((end.code(), end.message()), (Code::NotFound, "there is no job \"old\""));
    while next(&mut all).await.unwrap().gone != ["old"] {}
    succeed(served.nodes).await;
}

#[tokio::test]
async fn a_watch_ends_when_its_token_is_taken_away() {
    let (token_of_rita, line) = token("rita", &[]).await;
    let served = Served::start(&[&line]).await;
    let mut jobs = JobsClient::new(channel(&served.url).await);
    let mut train = jobs.watch(with(Some(&token_of_rita), watch(0))).await.unwrap().into_inner();
    next(&mut train).await.unwrap();
    served.set_users("");
    let end = loop {
        if let Err(end) = next(&mut train).await {
            break end;
        }
    };
    assert!(end.code() == Code::Unauthenticated && end.message().contains("no user has this token"), "{end:?}");
    succeed(served.nodes).await;
}

#[tokio::test]
async fn what_one_client_may_take_is_limited() {
    let (operator, line) = token("olga", &["--role", "operate"]).await;
    let served = Served::start(&[&line]).await;
    let olga = Some(&*operator);
    let mut jobs = JobsClient::new(channel(&served.url).await);
    let huge = AskRequest { job: "train".into(), wish: Some(Wish::Drain(Drain { node: "n".repeat(20_000) })) };
    let (refused, why) = code(jobs.ask(with(olga, huge)).await);
    assert!(refused == Code::OutOfRange && why.contains("too large"), "{refused} {why}");
    let most = AskRequest { job: "train".into(), wish: Some(Wish::Drain(Drain { node: "n".repeat(16_000) })) };
    assert_eq!(code(jobs.ask(with(olga, most)).await).0, Code::InvalidArgument);

    // As many as half of the port's connections, whatever connection they come on.
    let mut watches = Vec::new();
    let mut other = JobsClient::new(channel(&served.url).await);
    for number in 0..32 {
        let client = if number % 2 == 0 { &mut jobs } else { &mut other };
        let mut watch = client.watch(with(olga, watch(0))).await.unwrap().into_inner();
        next(&mut watch).await.unwrap();
        watches.push(watch);
    }
    let (refused, why) = code(jobs.watch(with(olga, watch(0))).await);
    assert!(refused == Code::ResourceExhausted && why.contains("as many watches are open"), "{refused} {why}");
    jobs.get(with(olga, GetRequest { job: "train".into() })).await.expect("other calls continue");
    watches.pop();
    eventually("there is a place again", WITHIN, async || jobs.clone().watch(with(olga, watch(0))).await.ok()).await;
    succeed(served.nodes).await;
}

#[tokio::test]
async fn many_jobs_come_in_messages_that_clients_take() {
    let (_coordinator, page, scene) = Scene::embedded(1, 1).await;
    // Five times what goes into a message.
    let (reason, ids) = ("r".repeat(100_000), (10..60).map(|number| format!("job-{number}")).collect::<Vec<_>>());
    for id in &ids {
        let round = json!({ "number": 1, "generation": 1, "state": "failed", "reason": reason }).to_string();
        scene.store.put(vec![], Op::put(scene.other(id).keys.round(), round)).await.unwrap();
    }
    let all = ids.len();
    let known = async || (http(&page, "/v1/jobs").await.matches("\"job\":").count() == all).then_some(());
    eventually("all jobs are known there", WITHIN, known).await;

    let mut jobs = JobsClient::new(channel(&format!("http://{page}")).await);
    let (mut listed, mut after, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = jobs.list(ListRequest { after, ..ListRequest::default() }).await.unwrap().into_inner();
        (pages, after) = (pages + 1, page.next.unwrap_or_default());
        listed.extend(page.jobs.into_iter().map(|job| job.job));
        if after.is_empty() {
            break;
        }
    }
    assert_eq!((&listed, pages), (&ids, 5));
    let mut watch = jobs.watch_all(WatchAllRequest {}).await.unwrap().into_inner();
    let (mut told, mut messages) = (Vec::new(), 0);
    loop {
        let message = next(&mut watch).await.unwrap();
        messages += 1;
        told.extend(message.jobs.into_iter().map(|job| job.job));
        if !message.more {
            break;
        }
    }
    assert_eq!((&told, messages), (&ids, 5));
}

#[tokio::test]
async fn it_is_served_over_tls_beside_the_json_api() {
    let (reader, line) = token("rita", &[]).await;
    let certs = Certs::new();
    let (cert, key) = (certs.server.0.display().to_string(), certs.server.1.display().to_string());
    let served = Served::over("https", &[&line], &["--http-cert", &cert, "--http-key", &key]).await;
    let connect = async |ca: &Certs| {
        let ca = Certificate::from_pem(std::fs::read(&ca.ca).unwrap());
        let endpoint = Endpoint::from_shared(served.url.clone()).unwrap();
        endpoint.tls_config(ClientTlsConfig::new().ca_certificate(ca)).unwrap().connect().await
    };
    let mut jobs = JobsClient::new(connect(&certs).await.unwrap());
    let get = || with(Some(&*reader), GetRequest { job: "train".into() });
    let job = eventually("the jobs were read", WITHIN, async || jobs.clone().get(get()).await.ok()).await;
    assert_eq!(job.into_inner().state(), JobState::Running);
    let (refused, why) = code(jobs.get(with(Some("nonsense"), GetRequest { job: "train".into() })).await);
    assert!(refused == Code::Unauthenticated && why.contains("no user has this token"), "{refused} {why}");
    assert!(connect(&Certs::new()).await.is_err(), "a stranger's certificate is not trusted");

    let ca = certs.ca.display().to_string();
    for version in ["--http1.1", "--http2"] {
        let answer = served.curl("/v1/jobs/train", Some(&reader), None, &["--cacert", &ca, version]).await;
        assert_eq!(answer.map(|(status, _)| status), Some(200), "{version}");
    }
    succeed(served.nodes).await;
}

#[tokio::test]
async fn clients_can_list_the_services_and_see_when_jobs_are_not_read() {
    let args = ["--etcd", "127.0.0.1:1", "--peer-listen", "127.0.0.1:0", "--http", "127.0.0.1:0"];
    let monitors = Process::start("elastic-coordinator", &args);
    let at = format!("http://{}", monitors.says("http://", WITHIN).await);
    code(Rpc::List.by(None, channel(&at).await).await);
    assert!(http(&at["http://".len()..], "/v1/jobs").await.contains("--http-jobs"));

    let coordinator = Process::start("elastic-coordinator", &[&args[..], &["--http-jobs"]].concat());
    let at = format!("http://{}", coordinator.says("http://", WITHIN).await);
    for call in [Rpc::List, Rpc::Get, Rpc::Watch, Rpc::WatchAll] {
        let (refused, why) = code(call.by(None, channel(&at).await).await);
        assert!(refused == Code::Unavailable && why.contains("is the store there?"), "{refused} {why}");
    }
    let question = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(channel(&at).await);
    let answers = client.server_reflection_info(futures::stream::iter([question])).await.unwrap();
    let answer = timeout(WITHIN, answers.into_inner().message()).await.unwrap().unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(listed)) = answer.message_response else { panic!("{answer:?}") };
    assert!(listed.service.iter().any(|service| service.name == "elastic.jobs.v1.Jobs"), "{listed:?}");
}
