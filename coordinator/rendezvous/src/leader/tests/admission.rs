//! What a stream must show before it counts as a node's.

use super::*;

fn secret(byte: u8) -> JobSecret {
    JobSecret::of([byte; JobSecret::LENGTH])
}

/// A leader that has read this job, with this record of a secret.
fn leads(scene: &Scene, known: Option<u8>, read: Option<Value>) -> (Leader, Vec<LeaderOutput>) {
    let leader = Leader::new(id("x"), scene.keys.clone(), Revision(5), NOW, 0).trusting(known.map(secret));
    let read = read.into_iter().map(|read| kv(scene.keys.secret(), read, 4)).collect();
    scene.led_by(leader, scene.store().into_iter().chain([read]))
}

fn demanded(leader: &Leader, name: &str) -> String {
    match leader.demand(&id(name)) {
        Demand::Wait => "wait".into(),
        Demand::Nothing => "nothing".into(),
        Demand::Proof(of) => {
            (1..=3).find(|byte| *of == secret(*byte)).map_or("?".into(), |byte| format!("proof {byte}"))
        }
    }
}

#[test]
fn a_stream_must_carry_a_proof_wherever_the_job_has_a_secret() {
    let here = Scene::new();
    let mut gone = Scene::new();
    gone.nodes.retain(|(name, _)| *name == "a");
    let ended = |state: &str| {
        let mut scene = Scene::new();
        scene.round["state"] = json!(state);
        scene
    };
    let wait = ["wait"; 3];
    // c is unknown.
    for (what, scene, has_secret, demands) in [
        ("a secret", &here, true, ["proof 1", "proof 1", "wait"]),
        ("none", &here, false, ["nothing", "nothing", "wait"]),
        ("a member whose key is gone", &gone, true, ["proof 1", "proof 1", "wait"]),
        ("the same without a secret", &gone, false, ["nothing", "nothing", "wait"]),
        // Anyone who begins it again writes another secret.
        ("a job that has failed", &ended("failed"), true, wait),
    ] {
        let (leader, _) = leads(scene, None, has_secret.then(|| json!(secret(1))));
        assert_eq!(["a", "b", "c"].map(|name| demanded(&leader, name)), demands, "{what}");
    }
    let unread = Leader::new(id("x"), here.keys.clone(), Revision(5), NOW, 0).trusting(Some(secret(1)));
    assert_eq!(["a", "b", "c"].map(|name| demanded(&unread, name)), wait);
}

#[test]
fn a_lost_secret_is_what_the_leader_knew_before() {
    let scene = Scene::new();
    for (what, known, read, demands, warns) in [
        ("the store's counts", Some(1), Some(json!(secret(2))), "proof 2", false),
        ("gone", Some(1), None, "proof 1", false),
        ("rubbish", Some(1), Some(json!({ "key": "AA" })), "proof 1", true),
        ("rubbish, and no node knows it", None, Some(json!({ "key": "AA" })), "nothing", true),
    ] {
        let (leader, wants) = leads(&scene, known, read);
        assert_eq!(demanded(&leader, "b"), demands, "{what}");
        let warned =
            |want: &LeaderOutput| matches!(want, LeaderOutput::Warn(line) if line.contains(&scene.keys.secret()));
        assert_eq!(wants.iter().any(warned), warns, "{what}: {wants:?}");
    }
}
