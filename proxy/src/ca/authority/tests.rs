use super::*;
use crate::ca::csr;
use crate::ca::keyring::Step;
use crate::identity::{Certificate, PrivateKey};

fn domain() -> TrustDomain {
    TrustDomain::parse("cluster.local").unwrap()
}

fn founded() -> Keyring {
    Keyring::found(&domain(), SystemTime::now()).unwrap()
}

fn of(keyring: &Keyring) -> Result<Authority, AuthorityError> {
    Authority::of_keyring("the Secret", keyring, &domain())
}

/// A certificate as a node proxy takes it.
fn certificate(authority: &Authority) -> Certificate {
    let id = SpiffeId::parse("spiffe://cluster.local/ns/shop/sa/cart").unwrap();
    let key = PrivateKey::generate().unwrap();
    let public_key = csr::public_key(&key.request(&id).unwrap()).unwrap();
    let signed = authority.sign(&id, &public_key, Duration::from_secs(600)).unwrap();
    Certificate::new(&id, &signed.chain, key).unwrap()
}

#[test]
fn two_replicas_of_one_root_sign_by_intermediates_of_their_own_under_the_same_root() {
    let keyring = founded();
    let [one, two] = [of(&keyring).unwrap(), of(&keyring).unwrap()];
    assert_eq!(one.root_pem(), two.root_pem());
    assert_ne!(one.signer_pem(), two.signer_pem());
    certificate(&one);
    certificate(&two);
}

#[test]
fn a_change_of_root_is_followed_step_by_step_and_every_answer_has_all_roots_last() {
    let (mut keyring, now) = (founded(), SystemTime::now());
    let authority = of(&keyring).unwrap();
    let old = certificate(&authority);
    let mut served = vec![authority.root_pem()];
    let mut signers = vec![authority.signer_pem()];
    for (step, roots) in [(Step::Publish, 2), (Step::Sign, 2), (Step::Renew, 2), (Step::Retire, 1)] {
        assert!(keyring.take(step, true, &domain(), now).done);
        authority.adopt(&keyring).unwrap();
        let id = SpiffeId::parse("spiffe://cluster.local/ns/shop/sa/cart").unwrap();
        let key = PrivateKey::generate().unwrap();
        let public_key = csr::public_key(&key.request(&id).unwrap()).unwrap();
        let chain = authority
            .sign(&id, &public_key, Duration::from_secs(600))
            .unwrap()
            .chain;
        assert_eq!(chain.len(), 3, "{step:?}");
        assert_eq!(chain[2].matches("BEGIN CERTIFICATE").count(), roots, "{step:?}");
        assert_eq!(chain[2], *authority.root_pem(), "{step:?}");
        Certificate::new(&id, &chain, key).unwrap();
        served.push(authority.root_pem());
        signers.push(authority.signer_pem());
    }
    drop(old);
    // The intermediate is another only where it has to be.
    assert_eq!(signers[0], signers[1]);
    assert!(signers[1] != signers[2] && signers[2] != signers[3]);
    assert_eq!(signers[3], signers[4]);
    // An older keyring, of a replica that has fallen behind, takes nothing back.
    let known = authority.root_pem();
    authority.adopt(&founded()).unwrap();
    assert_eq!(authority.root_pem(), known);
}

#[test]
fn a_root_of_another_trust_domain_or_without_its_key_is_refused() {
    let elsewhere = TrustDomain::parse("elsewhere").unwrap();
    let foreign = Keyring::found(&elsewhere, SystemTime::now()).unwrap();
    assert!(matches!(of(&foreign), Err(AuthorityError::TrustDomain { .. })));
    let nothing = Keyring::of_root(b"nothing", b"nothing").unwrap();
    assert!(matches!(of(&nothing), Err(AuthorityError::Unsound { .. })));
}

#[test]
fn a_provided_intermediate_signs_and_is_replaced_only_below_the_same_root() {
    let provided = |keyring: &Keyring| {
        let root = signing_root("the Secret", keyring, &domain()).unwrap();
        let made = root.make_intermediate(&domain(), SystemTime::now()).unwrap();
        Provided::parse(&made, &made, root.pem.as_bytes(), None, SystemTime::now()).unwrap()
    };
    let [root, other] = [(); 2].map(|()| founded());
    let authority = Authority::from_provided("the Secret", provided(&root), &domain()).unwrap();
    assert_eq!(*authority.root_pem(), root.bundle());
    certificate(&authority);
    authority.replace_provided("the Secret", provided(&root)).unwrap();
    certificate(&authority);
    assert!(authority.replace_provided("the Secret", provided(&other)).is_err());
    certificate(&authority);

    // The other root is added, changed over to, and the first taken away.
    let both = [root.bundle(), other.bundle()].concat();
    let with = |keyring: &Keyring, roots: &str| {
        let made = signing_root("the Secret", keyring, &domain()).unwrap();
        let made = made.make_intermediate(&domain(), SystemTime::now()).unwrap();
        Provided::parse(&made, &made, roots.as_bytes(), None, SystemTime::now()).unwrap()
    };
    for (below, roots) in [(&root, &both), (&other, &both), (&other, &other.bundle())] {
        authority.replace_provided("the Secret", with(below, roots)).unwrap();
        assert_eq!(*authority.root_pem(), **roots);
        certificate(&authority);
    }
}
