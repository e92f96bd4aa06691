//! Promises about files of roots, of what is distrusted and of what is revoked, held against any bytes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use super::certificates::Bundle;
use super::crl::{Crl, Subject, Word, ask, content};
use super::distrust::Distrust;
use crate::identity::fuzz::NOW;

/// The public key of an authority whose only list revokes the certificate with the serial number 7. Nobody has its private
/// half any more.
const ISSUER_KEY: &[u8] = include_bytes!("../../fuzzing/issuer-key.der");

/// A file of roots that is accepted has a root, and each once.
pub(crate) fn bundle(data: &[u8]) {
    let Ok(bundle) = Bundle::parse(data) else { return };
    let names: HashSet<_> = bundle.roots.iter().map(|root| root.name()).collect();
    assert!(!names.is_empty() && names.len() == bundle.roots.len());
}

/// A list of what is distrusted means the same as the names that are shown of it.
pub(crate) fn distrust(data: &[u8]) {
    let Ok(list) = Distrust::parse(data) else { return };
    let names = list.names();
    assert_eq!(names.len(), list.len());
    let again = Distrust::parse(names.join("\n").as_bytes()).expect("names that are shown can be read");
    assert_eq!(again.names(), names);
}

/// No list but the issuer's own is believed, and a file that is accepted has one.
pub(crate) fn crl(data: &[u8]) {
    let Ok(lists) = Crl::parse_file(data) else { return };
    assert!(!lists.is_empty());
    for list in lists.into_iter().map(Arc::new) {
        let serial: &[u8] = &[7];
        let subject = Subject {
            serial,
            issuer: content(&list.issuer).expect("the name of the issuer of a list that was accepted"),
            issuer_key: ISSUER_KEY,
            is_leaf: true,
        };
        let word = ask(&[Arc::clone(&list)], &subject, UNIX_EPOCH + NOW);
        assert!(
            word == Word::Nothing || (word == Word::Revoked && list.len() == 1),
            "{word:?} of {list:?}"
        );
    }
}
