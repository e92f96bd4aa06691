//! A map of which many states may be kept at once.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::sync::Arc;

/// Into how many parts the entries are divided: with 10,000 entries a change copies some 40 of them, a state 256 pointers.
const SHARDS: usize = 256;

/// A hash map whose clones share all parts that have not been changed since, so that a clone costs little, keeping many
/// costs what they differ in, and what they differ in is found quickly.
#[derive(Clone)]
pub(super) struct Shards<K, V> {
    hasher: RandomState,
    /// What tells its hasher from others.
    origin: u64,
    shards: Vec<Arc<HashMap<K, V>>>,
    len: usize,
}

impl<K: Eq + Hash + Clone, V: Clone> Default for Shards<K, V> {
    fn default() -> Self {
        let hasher = RandomState::new();
        Self {
            origin: hasher.hash_one(0),
            hasher,
            shards: vec![Arc::default(); SHARDS],
            len: 0,
        }
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Shards<K, V> {
    fn place<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        self.hasher.hash_one(key) as usize % SHARDS
    }

    pub(super) fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.shards[self.place(key)].get(key)
    }

    /// What was there before.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let place = self.place(&key);
        let before = Arc::make_mut(&mut self.shards[place]).insert(key, value);
        self.len += usize::from(before.is_none());
        before
    }

    /// What was there.
    pub(super) fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let place = self.place(key);
        if !self.shards[place].contains_key(key) {
            return None;
        }
        let shard = Arc::make_mut(&mut self.shards[place]);
        let before = shard.remove(key);
        // What has once been large is not to stay so.
        if shard.capacity() > 16 && shard.len() < shard.capacity() / 4 {
            shard.shrink_to_fit();
        }
        self.len -= usize::from(before.is_some());
        before
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards.iter().flat_map(|shard| shard.iter())
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// The keys of which `before` says otherwise, with what it says and what this does. Quick where one has come of the
    /// other by few changes.
    pub(super) fn differing<'a>(&'a self, before: &'a Self) -> Vec<(&'a K, Option<&'a V>, Option<&'a V>)>
    where
        V: PartialEq,
    {
        let mut differing = Vec::new();
        // Where neither comes of the other, equal keys may be in other places.
        if self.origin != before.origin {
            for (key, value) in self.iter() {
                match before.get(key) {
                    Some(known) if known == value => {}
                    known => differing.push((key, known, Some(value))),
                }
            }
            let gone = before.iter().filter(|(key, _)| self.get(*key).is_none());
            differing.extend(gone.map(|(key, known)| (key, Some(known), None)));
            return differing;
        }
        for (now, before) in self.shards.iter().zip(&before.shards) {
            if Arc::ptr_eq(now, before) {
                continue;
            }
            for (key, value) in now.iter() {
                match before.get(key) {
                    Some(known) if known == value => {}
                    known => differing.push((key, known, Some(value))),
                }
            }
            let gone = before.iter().filter(|(key, _)| !now.contains_key(*key));
            differing.extend(gone.map(|(key, known)| (key, Some(known), None)));
        }
        differing
    }
}

impl<K: fmt::Debug + Eq + Hash + Clone, V: fmt::Debug + Clone> fmt::Debug for Shards<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_stays_as_it_was_and_differs_in_what_was_changed_since() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut map = Shards::default();
        let mut expected = HashMap::new();
        for _ in 0..200 {
            let before = map.clone();
            let known = expected.clone();
            for _ in 0..rng.usize(0..20) {
                let key = rng.u32(0..500);
                if rng.bool() {
                    assert_eq!(map.insert(key, rng.u8(..2)), expected.get(&key).copied());
                    expected.insert(key, *map.get(&key).unwrap());
                } else {
                    assert_eq!(map.remove(&key), expected.remove(&key));
                }
            }
            assert_eq!(map.len(), expected.len());
            assert_eq!(map.iter().map(|(k, v)| (*k, *v)).collect::<HashMap<_, _>>(), expected);
            assert_eq!(before.iter().map(|(k, v)| (*k, *v)).collect::<HashMap<_, _>>(), known);
            let mut unrelated = Shards::default();
            for (key, value) in &known {
                unrelated.insert(*key, *value);
            }
            for before in [&before, &unrelated] {
                let differing: HashMap<u32, _> = map
                    .differing(before)
                    .into_iter()
                    .map(|(key, before, now)| (*key, (before.copied(), now.copied())))
                    .collect();
                let keys = expected.keys().chain(known.keys());
                let differs = |key: &&u32| expected.get(key) != known.get(key);
                let wanted: HashMap<u32, _> = keys
                    .filter(differs)
                    .map(|key| (*key, (known.get(key).copied(), expected.get(key).copied())))
                    .collect();
                assert_eq!(differing, wanted);
            }
        }
    }
}
