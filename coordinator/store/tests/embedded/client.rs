//! The Rust client: what `etcdctl` does not show.

use std::time::Duration;

use elastic_store::embedded::Options;
use elastic_store::embedded::mvcc::Limits;
use elastic_store::{Op, Revision, Store, Txn as OwnTxn};
use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, Error, GetOptions, PutOptions, Txn, TxnOp, TxnOpResponse,
};

use super::{serve, serve_with, within};

fn refusal(error: Error) -> (i32, String) {
    match error {
        Error::GRpcStatus(status) => (status.code() as i32, status.message().to_owned()),
        other => panic!("not a refusal by the server: {other}"),
    }
}

#[tokio::test]
async fn what_is_written_over_the_network_is_read_in_the_process_and_back() {
    let server = serve().await;
    let mut client = server.client().await;
    let put = client.put("a", "network", None).await.unwrap();
    assert_eq!(put.header().unwrap().revision(), 2);
    assert_eq!(server.store.get("a").await.unwrap().unwrap().value, b"network");
    let done = server.store.txn(OwnTxn::of([Op::put("a", "process")])).await.unwrap();
    let read = client.get("a", None).await.unwrap();
    let (header, kv) = (read.header().unwrap(), &read.kvs()[0]);
    assert_eq!((kv.value(), kv.create_revision(), kv.mod_revision(), kv.version()), (&b"process"[..], 2, 3, 2));
    assert_eq!(Revision(header.revision()), done.revision);
}

#[tokio::test]
async fn all_conditions_and_operations_of_a_transaction_arrive() {
    let server = serve().await;
    let mut client = server.client().await;
    client.put("a", "m", None).await.unwrap();
    client.put("a", "m", None).await.unwrap();
    let lease = client.lease_grant(60, None).await.unwrap().id();
    client.put("leased", "", Some(PutOptions::new().with_lease(lease))).await.unwrap();
    let holds = [
        Compare::value("a", CompareOp::Equal, "m"),
        Compare::value("a", CompareOp::Less, "n"),
        Compare::value("a", CompareOp::Greater, "l"),
        Compare::version("a", CompareOp::Equal, 2),
        Compare::create_revision("a", CompareOp::NotEqual, 3),
        Compare::mod_revision("a", CompareOp::Equal, 3),
        Compare::lease("leased", CompareOp::Equal, lease),
        Compare::create_revision("a", CompareOp::Greater, 0).with_prefix(),
        Compare::version("missing", CompareOp::Equal, 0).with_prefix(),
    ];
    let txn = Txn::new().when(holds).and_then([
        TxnOp::put("b", "2", Some(PutOptions::new().with_prev_key())),
        TxnOp::get("b", None),
        TxnOp::delete("a", None),
    ]);
    let response = client.txn(txn).await.unwrap();
    assert!(response.succeeded());
    let responses = response.op_responses();
    let [TxnOpResponse::Put(put), TxnOpResponse::Get(get), TxnOpResponse::Delete(delete)] = &responses[..] else {
        panic!("{responses:?}");
    };
    assert!(put.prev_key().is_none());
    assert_eq!((get.kvs()[0].value(), get.kvs()[0].mod_revision(), delete.deleted()), (&b"2"[..], 5, 1));
}

#[tokio::test]
async fn refusals_have_etcds_codes_and_texts() {
    let server = serve().await;
    let mut client = server.client().await;
    let (invalid, not_found, exists, out_of_range) = (3, 5, 9, 11);
    let refused = refusal(client.put("", "x", None).await.unwrap_err());
    assert_eq!(refused, (invalid, "etcdserver: key is not provided".into()));
    let many: Vec<_> = (0..129).map(|i| TxnOp::put(i.to_string(), "", None)).collect();
    let refused = refusal(client.txn(Txn::new().and_then(many)).await.unwrap_err());
    assert_eq!(refused, (invalid, "etcdserver: too many operations in txn request".into()));
    let refused = refusal(client.put("a", vec![0; 3 << 19], None).await.unwrap_err());
    assert_eq!(refused, (invalid, "etcdserver: request is too large".into()));
    let options = PutOptions::new().with_ignore_value();
    let refused = refusal(client.put("a", "x", Some(options)).await.unwrap_err());
    assert_eq!(refused, (invalid, "etcdserver: value is provided".into()));
    let refused = refusal(client.lease_revoke(7).await.unwrap_err());
    assert_eq!(refused, (not_found, "etcdserver: requested lease not found".into()));
    let id = client.lease_grant(60, None).await.unwrap().id();
    let again = etcd_client::LeaseGrantOptions::new().with_id(id);
    let refused = refusal(client.lease_grant(60, Some(again)).await.unwrap_err());
    assert_eq!(refused, (exists, "etcdserver: lease already exists".into()));
    let refused = refusal(client.lease_grant(9_000_000_001, None).await.unwrap_err());
    assert_eq!(refused, (out_of_range, "etcdserver: too large lease TTL".into()));
    let nested = Txn::new().and_then([TxnOp::txn(Txn::new())]);
    let refused = refusal(client.txn(nested).await.unwrap_err());
    assert!(refused.1.contains("no nested transactions"), "{refused:?}");
    let filtered = GetOptions::new().with_min_mod_revision(1);
    let refused = refusal(client.get("a", Some(filtered)).await.unwrap_err());
    assert!(refused.1.contains("no filter by mod revision"), "{refused:?}");
}

#[tokio::test]
async fn a_full_store_says_so_and_serves_on() {
    let limits = Limits { live_bytes: 4_000, ..Limits::default() };
    let server = serve_with(Options { limits, ..Options::default() }).await;
    let mut client = server.client().await;
    client.put("a", vec![b'x'; 3_000], None).await.unwrap();
    let refused = refusal(client.put("b", vec![b'x'; 3_000], None).await.unwrap_err());
    assert_eq!(refused, (8, "etcdserver: mvcc: database space exceeded".into()));
    client.delete("a", None).await.unwrap();
    client.put("b", vec![b'x'; 3_000], None).await.unwrap();
}

#[tokio::test]
async fn a_kept_lease_outlives_its_time_and_a_forgotten_one_is_answered_with_none_left() {
    let server = serve().await;
    let mut client = server.client().await;
    let lease = client.lease_grant(2, None).await.unwrap().id();
    client.put("mine", "", Some(PutOptions::new().with_lease(lease))).await.unwrap();
    let (mut keeper, mut stream) = client.lease_keep_alive(lease).await.unwrap();
    let since = tokio::time::Instant::now();
    let mut every = tokio::time::interval(Duration::from_millis(500));
    while since.elapsed() < Duration::from_secs(3) {
        every.tick().await;
        keeper.keep_alive().await.unwrap();
        assert_eq!(within(stream.message()).await.unwrap().unwrap().ttl(), 2);
    }
    assert_eq!(client.get("mine", None).await.unwrap().count(), 1);
    client.lease_revoke(lease).await.unwrap();
    keeper.keep_alive().await.unwrap();
    assert_eq!(within(stream.message()).await.unwrap().unwrap().ttl(), 0);
    assert_eq!(client.lease_time_to_live(lease, None).await.unwrap().ttl(), -1);
}

#[tokio::test]
async fn a_login_is_answered_that_there_is_none() {
    let server = serve().await;
    let options = ConnectOptions::new().with_user("root", "secret");
    let mut client = match within(Client::connect([server.address.to_string()], Some(options))).await {
        Ok(client) => client,
        Err(error) => return assert!(refusal(error).1.contains("authentication is not enabled")),
    };
    let refused = refusal(client.get("a", None).await.unwrap_err());
    assert!(refused.1.contains("authentication is not enabled"), "{refused:?}");
}
