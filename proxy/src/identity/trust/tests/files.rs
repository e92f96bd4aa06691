//! Files that take trust away, or give it to others.

use std::fs;
use std::path::Path;

use super::*;
use crate::identity::testing::{CrlOptions, id};
use crate::identity::{CertificateError, CrlPolicy, PeerChain, TrustDomain, TrustSettings};

const FINGERPRINT_OF_NOBODY: &str =
    "00:11:22:33:44:55:66:77:88:99:aa:bb:cc:dd:ee:ff:00:11:22:33:44:55:66:77:88:99:aa:bb:cc:dd:ee:ff";

fn trust(folder: &Path, change: impl FnOnce(&mut TrustSettings)) -> Trust {
    let mut settings = TrustSettings {
        distrust: Some(folder.join("distrusted")),
        ..TrustSettings::default()
    };
    change(&mut settings);
    Trust::new(settings)
}

fn remembered(judge: &Certificate, peer: &Certificate, role: Role) -> Arc<PeerChain> {
    judge
        .remember(peer.presented(), role, judge.trust().generation())
        .unwrap()
}

#[test]
fn a_distrusted_root_is_gone_at_once_whatever_names_it_and_with_it_all_that_rests_on_it() {
    let (stolen, new) = (TestCa::new(), TestCa::new());
    for by_fingerprint in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let node = trust(folder.path(), |_| {});
        let mine = stolen.certificate(&id("shop", "cart")).trusting(&node).unwrap();
        let peer = stolen.certificate(&id("shop", "till"));
        // Both roots are known by now.
        let (mut answer, key) = new.issue(&id("shop", "cart"));
        answer[2].push_str(&stolen.root_pem());
        let renewed = Certificate::new(&id("shop", "cart"), &answer, key)
            .unwrap()
            .trusting(&node)
            .unwrap();
        let good = new
            .certificate(&id("shop", "till"))
            .trusting(&trusting(&[&stolen, &new]))
            .unwrap();
        assert_agree(&mine, &peer, "before");
        assert_agree(&renewed, &good, "before");
        let (bad, fine) = (
            remembered(&mine, &peer, Role::Server),
            remembered(&mine, &good, Role::Client),
        );
        let mut changes = node.changes();

        let named = if by_fingerprint {
            stolen.root().name()
        } else {
            stolen.root_pem()
        };
        fs::write(
            folder.path().join("distrusted"),
            format!("{FINGERPRINT_OF_NOBODY}\n{named}\n"),
        )
        .unwrap();
        node.look();
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        for role in ROLES {
            assert_refused(
                &judged(&renewed, &peer.clone_for_test(&[&stolen, &new]), role),
                "named as distrusted",
            );
        }
        assert_agree(&renewed, &good, "after");
        assert!(bad.recheck().unwrap_err().contains("named as distrusted"));
        assert_eq!(fine.recheck(), Ok(()));
        // Our own certificate is of no use any more either: another is fetched.
        let now = std::time::SystemTime::now();
        assert!(!mine.is_valid_at(now) && renewed.is_valid_at(now));
        let again = stolen.certificate(&id("shop", "cart")).trusting(&node);
        assert_eq!(again.unwrap_err(), CertificateError::Distrusted);

        // Whoever has the key has it under other names too.
        let (mut answer, key) = stolen.issue(&id("shop", "till"));
        answer[2] = format!("{}{}", stolen.cross_signed_by(&new), new.root_pem());
        let thief = Certificate::new(&id("shop", "till"), &answer, key).unwrap();
        for role in ROLES {
            assert_refused(
                &judged(&renewed, &thief.clone_for_test(&[&stolen, &new]), role),
                "named as distrusted",
            );
        }

        // A list that cannot be read changes nothing.
        fs::write(folder.path().join("distrusted"), "nonsense").unwrap();
        node.look();
        assert!(!changes.has_changed().unwrap());
        assert_eq!(node.status().errors.len(), 1);
        assert!(
            judged(&renewed, &peer.clone_for_test(&[&stolen, &new]), Role::Client)
                .judge
                .is_err()
        );
    }
}

#[test]
fn a_foreign_bundle_vouches_for_identities_of_its_own_domain_alone() {
    let (home, foreign) = (TestCa::new(), TestCa::new());
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("foreign.pem");
    fs::write(&bundle, foreign.root_pem()).unwrap();
    let node = trust(folder.path(), |settings| {
        settings.foreign = vec![(TrustDomain::parse("other.example").unwrap(), bundle.clone())];
    });
    let mine = home.certificate(&id("shop", "cart")).trusting(&node).unwrap();
    // Federated both ways: the far side knows our domain as we know theirs.
    let theirs = folder.path().join("home.pem");
    fs::write(&theirs, home.root_pem()).unwrap();
    let knows_us = |settings: &mut TrustSettings| {
        settings.foreign = vec![(TrustDomain::parse("cluster.local").unwrap(), theirs.clone())];
    };
    let (far, credulous) = (trust(folder.path(), knows_us), trust(folder.path(), knows_us));
    credulous.learn(&[home.root(), foreign.root()], std::time::Duration::from_secs(3600));
    let friend = foreign
        .certificate(&of("other.example", "till"))
        .trusting(&far)
        .unwrap();
    assert_agree(&mine, &friend, "federated");
    // What is said of a chain by whom.
    for (ca, domain, reason) in [
        (
            &foreign,
            "cluster.local",
            "does not lead to a root that is trusted for cluster.local",
        ),
        (
            &home,
            "other.example",
            "does not lead to a root that is trusted for other.example",
        ),
        (&foreign, "third.example", "is not of the trust domain cluster.local"),
        (&home, "third.example", "is not of the trust domain cluster.local"),
    ] {
        let liar = ca.certificate(&of(domain, "till"));
        let liar = liar.for_test(&credulous, &credulous);
        for role in ROLES {
            assert_refused(&judged(&mine, &liar, role), reason);
        }
    }
    // A bundle that is not there vouches for nobody.
    let blind = trust(folder.path(), |settings| {
        settings.foreign = vec![(TrustDomain::parse("other.example").unwrap(), folder.path().join("none"))];
    });
    assert_eq!(blind.status().errors.len(), 1);
    let mine = home.certificate(&id("shop", "cart")).trusting(&blind).unwrap();
    assert_refused(&judged(&mine, &friend, Role::Client), "does not lead to a root");
}

#[test]
fn an_alias_of_the_trust_domain_is_the_same_at_both_ends() {
    let ca = TestCa::new();
    let folder = tempfile::tempdir().unwrap();
    let alias = |name: &str| {
        let name = TrustDomain::parse(name).unwrap();
        let trust = trust(folder.path(), |settings| settings.aliases = vec![name]);
        trust.learn(&[ca.root()], std::time::Duration::from_secs(3600));
        trust
    };
    // On the way from the old name to the new one.
    let moved = ca
        .certificate(&of("new.example", "cart"))
        .trusting(&alias("cluster.local"))
        .unwrap();
    let before = ca
        .certificate(&of("cluster.local", "till"))
        .trusting(&alias("new.example"))
        .unwrap();
    assert_agree(&moved, &before, "alias");
    // The mesh has another name for it than its certificate.
    let expected = of("new.example", "till");
    assert_eq!(
        shake(before.server_config(), moved.client_config(&expected)),
        (Ok(()), Ok(()))
    );
    let wrong = of("new.example", "other");
    let (_, of_client) = shake(before.server_config(), moved.client_config(&wrong));
    assert!(
        of_client
            .unwrap_err()
            .contains("is spiffe://cluster.local/ns/shop/sa/till's, not")
    );
    assert_eq!(remembered(&moved, &before, Role::Client).id(), &expected);
    assert_eq!(remembered(&moved, &moved, Role::Client).id(), moved.id());
}

#[test]
fn what_is_revoked_is_refused_and_cut_and_what_nothing_speaks_of_by_policy() {
    let ca = TestCa::new();
    let hour = std::time::Duration::from_secs(3600);
    let now = std::time::SystemTime::now();
    let stale = || CrlOptions {
        this_update: now - 2 * hour,
        next_update: now - hour,
        ..CrlOptions::default()
    };
    let of_root = || CrlOptions {
        of_root: true,
        ..CrlOptions::default()
    };
    for policy in [CrlPolicy::Lenient, CrlPolicy::Strict] {
        let strict = policy == CrlPolicy::Strict;
        let folder = tempfile::tempdir().unwrap();
        let lists = folder.path().join("crls");
        fs::create_dir(&lists).unwrap();
        let node = trust(folder.path(), |settings| {
            settings.crls = vec![lists.clone()];
            settings.crl_policy = policy;
        });
        // One's own certificate is not held up by lists that are missing.
        let mine = ca.certificate(&id("shop", "cart")).trusting(&node).unwrap();
        let (peer, other) = (ca.certificate(&id("shop", "till")), ca.certificate(&id("shop", "desk")));
        let set = |leaf: &[u8], root: &[u8]| {
            fs::write(lists.join("leaf.crl"), leaf).unwrap();
            fs::write(lists.join("root.crl"), root).unwrap();
            node.look();
        };
        let serial = hex_bytes(peer.serial());
        let intermediate = hex_bytes(&crate::identity::chain::hex(
            crate::identity::chain::parse(&ca.intermediate_der())
                .unwrap()
                .raw_serial(),
        ));
        let open = remembered(&mine, &peer, Role::Client);
        let unknown = judged(&mine, &peer, Role::Client);
        if strict {
            assert_refused(&unknown, "no revocation list speaks of the certificate");
        } else {
            assert_eq!(unknown.judge, Ok(()));
        }
        let clean = |options| ca.crl(&[], options).der;
        set(&clean(CrlOptions::default()), &clean(of_root()));
        assert_agree(&mine, &peer, "nothing is revoked");
        assert_eq!(open.recheck(), Ok(()));
        set(&clean(stale()), &clean(of_root()));
        let out_of_date = judged(&mine, &peer, Role::Server);
        if strict {
            assert_refused(&out_of_date, "is out of date");
        } else {
            assert_eq!(out_of_date.judge, Ok(()));
        }
        // A live connection ends for what is known against it, not for want of knowledge.
        assert_eq!(open.recheck(), Ok(()));
        // Named by a list, whether or not that is out of date.
        for options in [CrlOptions::default(), stale()] {
            set(ca.crl(&[&serial], options).pem.as_bytes(), &clean(of_root()));
            for role in ROLES {
                assert_refused(&judged(&mine, &peer, role), "is revoked");
            }
            assert!(
                open.recheck()
                    .unwrap_err()
                    .contains(&format!("serial number {} is revoked", peer.serial()))
            );
        }
        set(&ca.crl(&[&serial], CrlOptions::default()).der, &clean(of_root()));
        assert_agree(&mine, &other, "another's is revoked");
        // Its issuer's: everything below it.
        set(&clean(CrlOptions::default()), &ca.crl(&[&intermediate], of_root()).der);
        assert_refused(&judged(&mine, &other, Role::Client), "is revoked");
        assert!(!mine.is_valid_at(now));
        // A half list takes nothing back.
        set(&clean(CrlOptions::default())[..40], b"");
        assert_refused(&judged(&mine, &other, Role::Client), "is revoked");
        assert_eq!(node.status().errors.len(), 2);
    }
}

fn hex_bytes(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}
