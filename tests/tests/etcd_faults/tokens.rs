//! Tokens that a change of users or roles ends, and where there was none before. Those that end with time, in a whole
//! job, are in `deploy::users`; those that etcd forgets, in `access`.

use elastic_store::LeaseId;
use elastic_tests::prelude::*;
use tonic::Code;

use super::refusing_proxy::RefusingProxy;

const LIMIT: Duration = Duration::from_secs(15);
const ROOT: &str = "root-secret";

/// A login takes 0.1 s of a core by default: seconds, where others have the cores.
const QUICK: &str = "--bcrypt-cost=4";

/// They tell of old tokens in different words.
const TELL_DIFFERENTLY: [&str; 3] = ["3.4", "3.5", "3.7"];

fn store_of_trainer(config: EtcdConfig) -> EtcdStore {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "secret").unwrap();
    let password = Secret::from_file(file.path()).unwrap();
    let user = Some(EtcdUser { name: "trainer".into(), password });
    EtcdStore::connect(EtcdConfig { user, ..config }).unwrap()
}

fn own() -> Txn {
    Txn::of([Op::put("/elastic/a", "1")])
}

/// What an agent has of a store: a watch and a lease.
struct Held {
    store: EtcdStore,
    watcher: Watcher,
    lease: LeaseId,
}

impl Held {
    async fn by(store: EtcdStore) -> Held {
        let at = store.txn(own()).await.unwrap().revision;
        let watcher = store.watch(Scope::Prefix("/elastic/".into()), at.next()).await.unwrap();
        let lease = store.grant(Duration::from_secs(60)).await.unwrap();
        let mut held = Held { store, watcher, lease };
        held.is_well("at first").await;
        held
    }

    /// A write is carried out and known to be, the watch tells of it, a new one does too, and the lease is renewed.
    async fn is_well(&mut self, when: &str) {
        let at = self.store.txn(own()).await.unwrap_or_else(|error| panic!("{when}: {error}")).revision;
        let update = within("an event", LIMIT, self.watcher.recv()).await;
        assert!(
            matches!(&update, Some(WatchUpdate::Events(events)) if events[0].revision() == at),
            "{when}: {update:?}, not {at}"
        );
        let mut new = self.store.watch(Scope::Prefix("/elastic/".into()), Revision(1)).await.unwrap();
        let update = within("a new watch's event", LIMIT, new.recv()).await;
        assert!(matches!(&update, Some(WatchUpdate::Events(_))), "{when}: {update:?}");
        let renewed = self.store.keep_alive(self.lease).await;
        assert!(matches!(renewed, Ok(Some(_))), "{when}: {renewed:?}");
    }
}

#[tokio::test]
async fn a_change_of_users_or_roles_costs_nothing() {
    for (release, options) in EtcdOptions::of(TELL_DIFFERENTLY) {
        // Given tokens that are out of date as soon as any role is changed
        let (options, _key) = signed_tokens(options.args([QUICK]), "10m");
        let server = EtcdServer::start(options).await;
        server.enable_auth(ROOT, "secret").await;
        let mut held = Held::by(store_of_trainer(server.config())).await;

        // when one is, between two calls, then no one notices
        for role in ["one", "two"] {
            server.add_role(ROOT, role).await;
            held.is_well(&format!("{release}, after role {role}")).await;
        }

        // and neither while an administrator makes some
        let making = async {
            for n in 0..5 {
                server.add_role(ROOT, &format!("role-{n}")).await;
            }
        };
        let working = async {
            for n in 0..6 {
                held.is_well(&format!("{release}, while roles are made, {n}")).await;
            }
        };
        tokio::join!(making, working);
    }
}

#[tokio::test]
async fn a_new_token_may_be_out_of_date_again_but_not_for_ever() {
    let server = EtcdServer::start(EtcdOptions::default().args([QUICK])).await;
    server.enable_auth(ROOT, "secret").await;
    let words = "etcdserver: revision of auth store is old";
    let proxy = RefusingProxy::start(server.address(), Code::InvalidArgument, words).await;
    let store = store_of_trainer(EtcdConfig { endpoints: vec![proxy.address()], ..server.config() });

    // Given roles that change while it logs in, twice, then a write is carried out in the end
    proxy.refuse(3);
    store.txn(own()).await.unwrap();
    assert_eq!(proxy.refused(), 3);

    // And given an etcd that takes none of its tokens, then it says so
    proxy.refuse(100);
    let error = store.txn(own()).await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }) && error.to_string().contains("\"trainer\""), "{error}");
    assert_eq!(proxy.refused(), 3 + 4);
}

#[tokio::test]
async fn users_who_come_to_be_later_are_taken_for_what_they_are() {
    for (release, options) in EtcdOptions::of(TELL_DIFFERENTLY) {
        // Given a store with a user, on an etcd that asks for none
        let server = EtcdServer::start(options.args([QUICK])).await;
        let mut held = Held::by(store_of_trainer(server.config())).await;
        // when authentication is switched on, then it logs in
        server.enable_auth(ROOT, "secret").await;
        held.is_well(&format!("{release}, with users")).await;
    }
}
