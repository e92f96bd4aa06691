//! The provider against an agent that says what the test wants, over real gRPC on a Unix socket.

mod world;

use std::collections::HashMap;
use std::time::SystemTime;

use tonic::Code;

use self::world::{DEADLINE, SOON, Say, Told, World, bundles, cart, root_of, svid, svid_with, svids};
use super::*;
use crate::identity::testing::{LeafOptions, TestCa, id};
use crate::identity::{CallOutcome, CertStore, IdentityState, StoreSettings};

async fn is_ready(changed: &mut BoxFuture<'static, ()>, within: Duration) -> bool {
    tokio::time::timeout(within, changed).await.is_ok()
}

#[tokio::test]
async fn the_agent_is_asked_by_namespace_and_account_and_its_roots_are_trusted() {
    let world = World::new();
    // An entry of the whole namespace matches too.
    world.say(svids([svid(&world.ca, &id("shop", "any")), svid(&world.ca, &cart())]));
    let agent = world.agent();
    let issued = agent.issue(&cart()).await.unwrap();
    assert_eq!(issued.certificate.id(), &cart());
    assert_eq!(world.roots(), [format!("ours {}", root_of(&world.ca))]);
    let asked = world.scripted.asked.lock().unwrap().clone();
    let selectors: Vec<_> = asked[0]
        .iter()
        .map(|one| format!("{}:{}", one.r#type, one.value))
        .collect();
    assert_eq!(selectors, ["k8s:ns:shop", "k8s:sa:cart"]);
}

#[tokio::test]
async fn what_is_refused_or_wrong_is_said_with_what_to_do() {
    let world = World::new();
    let ca = &world.ca;
    let good = || svid(ca, &cart());
    let with_chain = |change: &dyn Fn(&mut Vec<Vec<u8>>)| {
        let mut svid = good();
        change(&mut svid.x509_svid.as_mut().unwrap().cert_chain);
        Say::This(svids([svid]))
    };
    let with_key = |key: Vec<u8>| {
        Say::This(svids([X509svidWithKey {
            x509_svid_key: key,
            ..good()
        }]))
    };
    let renamed = |mut svid: X509svidWithKey, domain: &str| {
        let id = svid.x509_svid.as_mut().unwrap().id.as_mut().unwrap();
        (id.trust_domain, id.path) = (domain.to_owned(), "/ns/shop/sa/cart".to_owned());
        Say::This(svids([svid]))
    };
    let now = SystemTime::now();
    let old = LeafOptions {
        not_before: now - Duration::from_secs(60),
        not_after: now - Duration::from_secs(1),
        ..LeafOptions::default()
    };
    let large = Say::This(svids((0..100).map(|_| good())));
    for (say, outcome, told) in [
        (
            Say::This(svids([])),
            CallOutcome::PermissionDenied,
            "k8s:ns:shop and k8s:sa:cart",
        ),
        (
            Say::This(svids([svid(ca, &id("shop", "till"))])),
            CallOutcome::PermissionDenied,
            "but of spiffe://cluster.local/ns/shop/sa/till",
        ),
        (
            renamed(good(), "other.example"),
            CallOutcome::PermissionDenied,
            "but of spiffe://other.example/ns",
        ),
        (
            renamed(svid(ca, &id("shop", "till")), "cluster.local"),
            CallOutcome::BadAnswer,
            "till's, not",
        ),
        (
            with_chain(&|chain| chain.clear()),
            CallOutcome::BadAnswer,
            "no certificate",
        ),
        (
            with_chain(&|chain| chain[0] = b"x".to_vec()),
            CallOutcome::BadAnswer,
            "not an X.509 certificate",
        ),
        (
            with_chain(&|chain| chain.truncate(1)),
            CallOutcome::BadAnswer,
            "does not lead to a root",
        ),
        (
            with_chain(&|chain| *chain = vec![chain[0].clone(); 9]),
            CallOutcome::BadAnswer,
            "chain of 9 certificates is too long",
        ),
        (with_key(Vec::new()), CallOutcome::BadAnswer, "not a private key"),
        (with_key(vec![0x30; 64]), CallOutcome::BadAnswer, "not a private key"),
        (
            with_key(good().x509_svid_key),
            CallOutcome::BadAnswer,
            "for another key",
        ),
        (
            Say::This(svids([svid_with(ca, &cart(), old)])),
            CallOutcome::BadAnswer,
            "has expired",
        ),
        (
            Say::This(svids([svid(&TestCa::new(), &cart())])),
            CallOutcome::BadAnswer,
            "does not lead to a root",
        ),
        (large, CallOutcome::BadAnswer, "unusable"),
        (
            Say::Refusal(
                Code::PermissionDenied,
                "caller not configured as an authorized delegate",
            ),
            CallOutcome::Unauthenticated,
            "authorized_delegates",
        ),
        (
            Say::Refusal(Code::PermissionDenied, "no identity issued"),
            CallOutcome::Unauthenticated,
            "unix:uid:0",
        ),
        (
            Say::Refusal(Code::Unimplemented, "unknown service"),
            CallOutcome::Rejected,
            "admin_socket_path",
        ),
        (
            Say::Refusal(Code::InvalidArgument, "no selectors"),
            CallOutcome::Rejected,
            "no selectors",
        ),
        (
            Say::Refusal(Code::ResourceExhausted, "enough"),
            CallOutcome::Busy,
            "enough",
        ),
        (
            Say::Refusal(Code::Unavailable, "not yet"),
            CallOutcome::Unavailable,
            "not yet",
        ),
        (
            Say::Refusal(Code::Internal, "broken"),
            CallOutcome::Unavailable,
            "broken",
        ),
        (Say::GoodBye, CallOutcome::Unavailable, "ended the call"),
        (Say::Nothing, CallOutcome::Deadline, "did not answer"),
    ] {
        world.scripted.svids.send_replace(say);
        let error = world.agent().issue(&cart()).await.map(drop).unwrap_err();
        assert_eq!(error.outcome(), outcome, "{error}");
        assert!(error.to_string().contains(told), "{told}: {error}");
        assert!(error.to_string().contains("the SPIRE agent at /"), "{error}");
    }
}

#[tokio::test]
async fn without_a_bundle_of_our_own_trust_domain_nothing_is_issued() {
    let world = World::new();
    let raw = |bytes: &[u8]| {
        Say::This(Told {
            ca_certificates: HashMap::from([("spiffe://cluster.local".to_owned(), bytes.to_vec())]),
        })
    };
    let leaf = svid(&world.ca, &cart()).x509_svid.unwrap().cert_chain.swap_remove(0);
    for (say, outcome, told) in [
        (
            Say::This(bundles(&[("a.example", &[&world.ca]), ("b.example", &[&world.ca])])),
            CallOutcome::BadAnswer,
            "no bundle of cluster.local, but of a.example, b.example",
        ),
        (Say::This(bundles(&[])), CallOutcome::BadAnswer, "but of none"),
        (raw(b""), CallOutcome::BadAnswer, "does not end in a root"),
        (raw(b"garbage"), CallOutcome::BadAnswer, "not an X.509 certificate"),
        (raw(&leaf), CallOutcome::BadAnswer, "is not an authority's"),
        (
            Say::Refusal(Code::PermissionDenied, "no identity issued"),
            CallOutcome::Unauthenticated,
            "unix:uid:0",
        ),
        (Say::GoodBye, CallOutcome::Unavailable, "ended the call"),
        (Say::Nothing, CallOutcome::Deadline, "did not answer"),
    ] {
        world.scripted.bundles.send_replace(say);
        let error = world.agent().issue(&cart()).await.map(drop).unwrap_err();
        assert_eq!(error.outcome(), outcome, "{error}");
        assert!(error.to_string().contains(told), "{told}: {error}");
        assert!(!world.roots().iter().any(|root| root.starts_with("ours")));
    }
    assert!(world.scripted.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_agent_that_is_away_is_told_of_with_its_socket_and_found_when_it_comes() {
    let mut world = World::new();
    world.kill();
    let agent = world.agent();
    let error = agent.issue(&cart()).await.map(drop).unwrap_err();
    assert_eq!(error.outcome(), CallOutcome::Unavailable, "{error}");
    let socket = world.socket().display().to_string();
    assert!(
        error.to_string().contains(&socket) && error.to_string().contains("No such file"),
        "{error}"
    );
    world.start();
    let found = async {
        while agent.issue(&cart()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, found).await.unwrap();
}

#[tokio::test]
async fn a_certificate_has_changed_when_the_agent_has_another_or_none_or_has_ended() {
    let brief = Duration::from_millis(100);
    let mut world = World::new();
    let agent = world.agent();
    let first = svid(&world.ca, &cart());
    world.say(svids([first.clone()]));
    let mut changed = agent.issue(&cart()).await.unwrap().changed;
    // As when a bundle has changed, or another identity that matches.
    world.say(svids([svid(&world.ca, &id("shop", "any")), first]));
    assert!(!is_ready(&mut changed, brief).await);
    world.say(svids([svid(&world.ca, &cart())]));
    assert!(is_ready(&mut changed, SOON).await);

    let mut changed = agent.issue(&cart()).await.unwrap().changed;
    world.say(svids([svid(&world.ca, &id("shop", "any"))]));
    assert!(is_ready(&mut changed, SOON).await);

    world.say(svids([svid(&world.ca, &cart())]));
    let mut changed = agent.issue(&cart()).await.unwrap().changed;
    world.kill();
    assert!(is_ready(&mut changed, SOON).await);
}

#[tokio::test]
async fn a_rotated_bundle_counts_at_once_and_after_the_agent_was_away() {
    let (mut world, next, last) = (World::new(), TestCa::new(), TestCa::new());
    let agent = world.agent();
    agent.issue(&cart()).await.unwrap();
    let (first, second, third) = (root_of(&world.ca), root_of(&next), root_of(&last));
    let ours = |roots: &[&String]| roots.iter().map(|root| format!("ours {root}")).collect::<Vec<_>>();
    world.say_bundles(bundles(&[("cluster.local", &[&world.ca, &next])]));
    world.wait_for_roots(&ours(&[&first, &second])).await;
    // Certificates below it may still be about.
    world.say_bundles(bundles(&[("cluster.local", &[&next])]));
    world.wait_for_roots(&ours(&[&format!("{first}*"), &second])).await;
    world.kill();
    world.say_bundles(bundles(&[("cluster.local", &[&next, &last])]));
    world.start();
    world
        .wait_for_roots(&ours(&[&format!("{first}*"), &second, &third]))
        .await;
    // Garbage takes nothing away.
    world.say_bundles(bundles(&[("cluster.local", &[])]));
    world.say(svids([svid(&next, &cart())]));
    agent.issue(&cart()).await.unwrap();
    assert_eq!(world.roots().len(), 3);
}

#[tokio::test]
async fn other_trust_domains_are_federated_exactly_as_the_agent_has_them() {
    let (world, other, third) = (World::new(), TestCa::new(), TestCa::new());
    let agent = world.agent();
    let ours = format!("ours {}", root_of(&world.ca));
    let of = |domain: &str, ca: &TestCa| format!("{domain} {}", root_of(ca));
    world.say_bundles(bundles(&[
        ("cluster.local", &[&world.ca]),
        ("other.example", &[&other]),
        ("third.example", &[&third]),
    ]));
    let all = [ours.clone(), of("other.example", &other), of("third.example", &third)];
    world.wait_for_roots(&all).await;
    // One that cannot be used gives nothing, and holds up no other.
    let mut broken = bundles(&[("cluster.local", &[&world.ca]), ("other.example", &[&third])]);
    broken
        .ca_certificates
        .insert("spiffe://third.example".to_owned(), b"garbage".to_vec());
    broken
        .ca_certificates
        .insert("spiffe://Not A Domain".to_owned(), Vec::new());
    world.say_bundles(broken);
    world.wait_for_roots(&[ours.clone(), of("other.example", &third)]).await;
    world.say_bundles(bundles(&[("cluster.local", &[&world.ca])]));
    world.wait_for_roots(&[ours]).await;
    drop(agent);
}

#[tokio::test]
async fn in_the_store_an_entry_that_is_gone_leaves_the_certificate_and_says_why() {
    let world = World::new();
    let settings = StoreSettings {
        trust: world.trust.clone(),
        ..StoreSettings::default()
    };
    let store = CertStore::new(Arc::new(world.agent()), settings);
    let _lease = store.acquire(&cart());
    let first = store.get(&cart()).await.unwrap().serial().clone();
    let renewed = svid(&world.ca, &cart());
    world.say(svids([renewed]));
    let until = async |what: &dyn Fn() -> bool| {
        let there = async {
            while !what() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(SOON, there).await.unwrap();
    };
    until(&|| store.try_get(&cart()).is_some_and(|now| *now.serial() != first)).await;
    world.say(svids([]));
    until(&|| store.snapshot()[0].state == IdentityState::Stale).await;
    let status = &store.snapshot()[0];
    assert!(
        status.last_error.as_ref().unwrap().contains("k8s:sa:cart"),
        "{status:?}"
    );
    store.get(&cart()).await.unwrap();
}

#[test]
fn debug_output_shows_nothing_of_a_key() {
    let mut svid = svid(&TestCa::new(), &cart());
    (svid.x509_svid, svid.x509_svid_key) = (None, vec![211; 5]);
    assert!(!format!("{:?}", svids([svid])).contains("211, 211"));
}

#[test]
fn a_socket_is_an_absolute_path() {
    for path in ["", "run/admin.sock", "unix:///run/admin.sock"] {
        assert_eq!(
            AdminSocket::new(path, DEADLINE).map(drop),
            Err(SpireSettingsError::Socket(path.to_owned()))
        );
    }
}
