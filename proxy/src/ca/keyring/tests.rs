use super::*;

const DAY: u64 = 24 * 60 * 60;

fn domain() -> TrustDomain {
    TrustDomain::parse("cluster.local").unwrap()
}

fn founded() -> (Keyring, SystemTime) {
    let now = SystemTime::now();
    let mut keyring = Keyring::found(&domain(), now).unwrap();
    keyring.note_lifetime(Duration::from_secs(DAY));
    (keyring, now)
}

/// The step, so many seconds later, with the keyring written and read before and after, as it would be by a process
/// that is killed in between.
fn take(keyring: &mut Keyring, step: Step, force: bool, now: SystemTime, later: u64) -> Answer {
    *keyring = Keyring::read(&keyring.write().unwrap()).unwrap();
    let answer = keyring.take(step, force, &domain(), now + Duration::from_secs(later));
    *keyring = Keyring::read(&keyring.write().unwrap()).unwrap();
    answer
}

#[test]
fn a_root_is_changed_in_steps_none_of_which_is_taken_too_early_or_twice() {
    let (mut keyring, now) = founded();
    let old = keyring.bundle();
    for (step, later, done, phase, roots) in [
        (Step::Sign, 0, false, Phase::Steady, 1),
        (Step::Retire, 0, true, Phase::Steady, 1),
        (Step::Publish, 0, true, Phase::Published, 2),
        (Step::Publish, 1, true, Phase::Published, 2),
        (Step::Retire, 2, false, Phase::Published, 2),
        (Step::Sign, DAY, false, Phase::Published, 2),
        (Step::Sign, DAY + 60, true, Phase::Signing, 2),
        (Step::Sign, DAY + 61, true, Phase::Signing, 2),
        (Step::Publish, DAY + 62, false, Phase::Signing, 2),
        (Step::Cancel, DAY + 62, false, Phase::Signing, 2),
        (Step::Retire, 2 * DAY, false, Phase::Signing, 2),
        (Step::Retire, 2 * DAY + 120, true, Phase::Steady, 1),
        (Step::Retire, 2 * DAY + 121, true, Phase::Steady, 1),
    ] {
        let before = keyring.revision;
        let was = keyring.phase();
        let answer = take(&mut keyring, step, false, now, later);
        assert_eq!(
            (answer.done, keyring.phase()),
            (done, phase),
            "{step:?} at {later}: {answer:?}"
        );
        assert_eq!(keyring.standing().roots.len(), roots);
        assert_eq!(keyring.revision > before, was != phase, "{step:?} at {later}");
    }
    assert!(!keyring.bundle().contains(&old));
}

#[test]
fn what_signs_is_among_what_is_trusted_at_every_step() {
    let (mut keyring, now) = founded();
    for step in [
        Step::Publish,
        Step::Sign,
        Step::Renew,
        Step::Retire,
        Step::Publish,
        Step::Cancel,
    ] {
        let known = keyring.bundle();
        assert!(take(&mut keyring, step, true, now, 1).done, "{step:?}");
        let (key, certificate) = keyring.signing();
        assert!(keyring.bundle().contains(certificate) && key.contains("PRIVATE KEY"));
        // And was so before.
        assert!(known.contains(certificate), "{step:?}");
    }
    assert_eq!((keyring.phase(), keyring.epoch), (Phase::Steady, 1));
}

#[test]
fn an_emergency_need_not_wait() {
    let (mut keyring, now) = founded();
    for step in [Step::Publish, Step::Sign, Step::Retire] {
        assert!(take(&mut keyring, step, true, now, 0).done);
    }
    assert_eq!(keyring.phase(), Phase::Steady);
}

#[test]
fn keys_are_not_shown() {
    let (keyring, _) = founded();
    let shown = format!("{keyring:?} {}", serde_json::to_string(&keyring.standing()).unwrap());
    assert!(
        !shown.contains("PRIVATE") && shown.contains(&fingerprint(&keyring.bundle())),
        "{shown}"
    );
}

#[test]
fn what_is_damaged_is_not_read() {
    let (keyring, _) = founded();
    let good = keyring.write().unwrap();
    assert!(Keyring::read(&good[..good.len() / 2]).is_err());
    let text = String::from_utf8(good.to_vec()).unwrap();
    assert!(Keyring::read(text.replace("\"signing\":0", "\"signing\":1").as_bytes()).is_err());
    assert!(Keyring::read(b"{}").is_err());
}

#[test]
fn copies_of_any_time_before_are_known_and_other_keys_are_not() {
    let (mut keyring, now) = founded();
    let mut copies = vec![keyring.clone()];
    for step in [Step::Publish, Step::Cancel, Step::Publish, Step::Sign, Step::Retire] {
        take(&mut keyring, step, true, now, 1);
        for copy in &copies {
            assert!(copy.is_earlier_than(&keyring), "{copy:?} before {step:?}");
        }
        copies.push(keyring.clone());
    }
    let (others, _) = founded();
    assert!(!others.is_earlier_than(&keyring));
}

#[test]
fn a_certificate_without_an_end_of_line_stays_apart_from_the_next() {
    let (keyring, now) = founded();
    let (key, certificate) = keyring.signing();
    let mut brought = Keyring::of_root(key.as_bytes(), certificate.trim_end().as_bytes()).unwrap();
    take(&mut brought, Step::Publish, false, now, 0);
    assert_eq!(signer::certificates(brought.bundle().as_bytes()).unwrap().len(), 2);
}
