//! Rights that an operator takes from the agents of a job that runs, and gives back.

use elastic_tests::prelude::*;
use etcd_client::GetOptions;

use crate::deploy::users::{Users, is_untouched};

const WHO: &str = "elastic-agents-job";

/// The job's keys that hang on leases.
async fn leased(users: &Users) -> i64 {
    let mut root = users.etcd.client_of("root", "secret-root").await;
    let count = async |client: &mut etcd_client::Client, key: &str| {
        let counted = GetOptions::new().with_prefix().with_count_only();
        client.get(format!("/elastic/v1/jobs/job/{key}"), Some(counted)).await.unwrap().count()
    };
    count(&mut root, "nodes/").await + count(&mut root, "leader").await
}

async fn continues_without_rights(release: &str, options: EtcdOptions) {
    // Given a job of two nodes; one of them leads
    let users = Users::on(options).await.made();
    let job = users.job(WHO, "1:2").flag("--max-restarts=0").conf("takeover_delay", "60s");
    let mut agents = job.start_all(["a", "b"]);
    let first = job.runs(1, 2).await;
    // when its user loses its rights, so that the leases end where renewals need one
    users.etcd.client_of("root", "secret-root").await.user_revoke_role(WHO, WHO).await.expect("take the role");
    if release == "3.4" {
        tokio::time::sleep(LEASE * 2).await;
        assert_eq!(leased(&users).await, 3, "{release}");
    } else {
        eventually("the leases end", LIMIT, async || (leased(&users).await == 0).then_some(())).await;
    }
    // then its workers continue for longer than any proof of theirs lasts
    tokio::time::sleep(LEASE * 2).await;
    is_untouched(&users, &first, &format!("{release}, without rights")).await;

    // When it has them again, then all keys are back, and the round is the same
    users.etcd.client_of("root", "secret-root").await.user_grant_role(WHO, WHO).await.expect("give it back");
    eventually("the keys are back", LIMIT, async || (leased(&users).await == 3).then_some(())).await;
    tokio::time::sleep(LEASE).await;
    is_untouched(&users, &first, &format!("{release}, with rights again")).await;
    users.asks("elastic-operator-job", &["drain", "job", "b"]).await;
    let second = job.runs(first.number + 1, 1).await;
    assert_eq!((second.number, second.restarts()), (first.number + 1, 0), "{release}");
    agents[1].exit(LIMIT).await;
    second.workers[0].exit(0);
    assert_eq!(agents[0].exit(LIMIT).await, 0, "{release}: {}", agents[0].output());
    assert_eq!(users.described().await["evicted"], json!([]), "{release}");
}

#[tokio::test]
async fn rights_that_are_away_for_a_while_cost_a_job_nothing() {
    let on_each = EtcdOptions::of(["3.4", "3.5", "3.7"]).into_iter().map(|(release, options)| {
        eprintln!("on {release}");
        continues_without_rights(release, options)
    });
    futures::future::join_all(on_each).await;
}

/// Where etcd takes the CN of a certificate for the user, no password is given.
#[tokio::test]
async fn a_certificate_is_enough_for_a_job_and_is_named_where_it_is_refused() {
    let certs = Arc::new(Certs::new());
    let options = EtcdOptions { tls: Some(certs.clone()), client_certificates: true, ..Default::default() };
    let etcd = EtcdServer::start(options).await;
    etcd.client().await.user_add("client", "unused", None).await.unwrap();
    etcd.enable_auth("root-secret", "secret").await;
    etcd.client_of("root", "root-secret").await.user_grant_role("client", "trainer").await.unwrap();
    let (file, key) = (certs.client.0.display().to_string(), certs.client.1.display().to_string());
    let job = Job::on(&etcd, "1").conf("cacert", &certs.ca.display().to_string()).conf("cert", &file).conf("key", &key);
    let mut agent = job.start("a");
    let round = job.runs(1, 1).await;

    etcd.client_of("root", "root-secret").await.user_revoke_role("client", "trainer").await.unwrap();
    let who = format!("permission denied for user \"client\" (the CN of {file}), who needs the right to write");
    agent.says(&who, LIMIT).await;
    etcd.client_of("root", "root-secret").await.user_grant_role("client", "trainer").await.unwrap();
    round.exit(0);
    assert_eq!(agent.exit(LIMIT).await, 0, "{}", agent.output());
}
