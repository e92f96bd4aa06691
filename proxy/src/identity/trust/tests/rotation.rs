//! The CA goes from one root to the next.

use super::*;
use crate::identity::testing::id;

/// A certificate as a node gets it: for an identity, signed by `ca`, in an answer with these roots.
fn issued(node: &Trust, ca: &TestCa, roots: &[String], account: &str) -> Certificate {
    let id = id("shop", account);
    let (mut answer, key) = ca.issue(&id);
    answer.truncate(2);
    answer.extend_from_slice(roots);
    Certificate::new(&id, &answer, key).unwrap().trusting(node).unwrap()
}

#[test]
fn with_overlap_every_node_agrees_with_every_other_however_far_each_has_come() {
    let (old, new) = (TestCa::new(), TestCa::new());
    let (r1, r2) = (old.root_pem(), new.root_pem());
    let together = vec![format!("{r1}{r2}")];
    let apart = vec![r1.clone(), r2.clone()];
    for both in [together, apart] {
        // Signed by which, with which roots: each step begins when the one before has reached every node.
        let steps: [(&TestCa, &[String]); 4] = [
            (&old, std::slice::from_ref(&r1)),
            (&old, &both),
            (&new, &both),
            (&new, std::slice::from_ref(&r2)),
        ];
        let nodes = [Trust::default(), Trust::default(), Trust::default()];
        let at = |node: &Trust, step: usize, account| issued(node, steps[step].0, steps[step].1, account);
        let mut certificates: Vec<_> = nodes.iter().map(|node| at(node, 0, "cart")).collect();
        for step in 1..4 {
            for turn in 0..3 {
                certificates[turn] = at(&nodes[turn], step, "till");
                for one in &certificates {
                    for other in &certificates {
                        assert_agree(one, other, &format!("step {step}, turn {turn}"));
                    }
                }
            }
        }
    }
}

#[test]
fn with_a_cross_signed_root_those_agree_who_know_only_the_old_one() {
    let (old, new) = (TestCa::new(), TestCa::new());
    let (ahead, behind) = (Trust::default(), Trust::default());
    let behind = issued(&behind, &old, &[old.root_pem()], "cart");
    // The new root's own certificate by the old one goes along with the chain.
    let roots = format!("{}{}{}", new.cross_signed_by(&old), new.root_pem(), old.root_pem());
    let ahead = issued(&ahead, &new, &[roots], "till");
    assert_agree(&ahead, &behind, "cross-signed");
    // And those who know the new one alone.
    let done = issued(&Trust::default(), &new, &[new.root_pem()], "done");
    assert_eq!(judged(&done, &ahead, Role::Client).judge, Ok(()));
}

#[test]
fn without_overlap_the_reason_names_the_domain_and_the_issuer() {
    let (old, new) = (TestCa::new(), TestCa::new());
    let one = issued(&Trust::default(), &old, &[old.root_pem()], "cart");
    let other = issued(&trusting(&[&old]), &new, &[new.root_pem()], "till");
    for role in ROLES {
        let seen = judged(&one, &other, role);
        assert_refused(&seen, "does not lead to a root that is trusted for cluster.local");
        assert_refused(&seen, "test root");
    }
}

#[test]
fn a_root_is_learnt_before_its_certificate_is_served_and_a_file_gives_it_without_any() {
    let (old, new) = (TestCa::new(), TestCa::new());
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle.pem");
    std::fs::write(&bundle, old.root_pem()).unwrap();
    let node = Trust::new(crate::identity::TrustSettings {
        bundles: vec![bundle.clone()],
        ..crate::identity::TrustSettings::default()
    });
    let mine = issued(&node, &old, &[old.root_pem()], "cart");
    let ahead = issued(&trusting(&[&old]), &new, &[new.root_pem()], "till");
    assert!(judged(&mine, &ahead, Role::Client).judge.is_err());
    std::fs::write(&bundle, format!("{}{}", old.root_pem(), new.root_pem())).unwrap();
    node.look();
    // The very same certificate and configuration.
    assert_agree(&mine, &ahead, "after the bundle has come");
    let open = mine
        .remember(
            &[ahead_leaf(&ahead), ahead_intermediate(&new)],
            Role::Client,
            node.generation(),
        )
        .unwrap();
    // Out of the file again: no new connections, and those that are open go on.
    std::fs::write(&bundle, old.root_pem()).unwrap();
    node.look();
    assert!(judged(&mine, &ahead, Role::Client).judge.is_err());
    assert_eq!(open.recheck(), Ok(()));
    assert_eq!(node.status().retired, 1);
}

fn ahead_leaf(certificate: &Certificate) -> rustls_pki_types::CertificateDer<'static> {
    certificate.presented()[0].clone()
}

fn ahead_intermediate(ca: &TestCa) -> rustls_pki_types::CertificateDer<'static> {
    ca.intermediate_der()
}
