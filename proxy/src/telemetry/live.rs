//! The connections that are open now.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::series::Series;
use crate::dataplane::record::Connection;

/// Ids are given in sequence, so neighbours in time lock different shards.
const SHARDS: usize = 16;

/// An open connection, and what of it is counted already.
pub(super) struct Live {
    connection: Arc<Connection>,
    series: Arc<Series>,
    counted: (u64, u64),
}

impl Live {
    fn count_bytes(&mut self) {
        let (sent, received) = self.connection.bytes();
        self.series
            .sent
            .fetch_add(sent.saturating_sub(self.counted.0), Ordering::Relaxed);
        self.series
            .received
            .fetch_add(received.saturating_sub(self.counted.1), Ordering::Relaxed);
        self.counted = (sent, received);
    }

    /// Counts the last bytes, and gives back where the end is to be counted.
    pub(super) fn finish(mut self) -> Arc<Series> {
        self.count_bytes();
        self.series
    }
}

type Shard = HashMap<u64, Live, BuildHasherDefault<SequenceHasher>>;

/// All open connections, by id.
#[derive(Default)]
pub(super) struct LiveTable {
    shards: [Mutex<Shard>; SHARDS],
}

impl LiveTable {
    pub(super) fn insert(&self, connection: Arc<Connection>, series: Arc<Series>) {
        let id = connection.id;
        self.shard(id).insert(
            id,
            Live {
                connection,
                series,
                counted: (0, 0),
            },
        );
    }

    pub(super) fn remove(&self, id: u64) -> Option<Live> {
        let mut shard = self.shard(id);
        let live = shard.remove(&id);
        // After a wave of connections its room goes back.
        if shard.capacity() > 256 && shard.len() < shard.capacity() / 8 {
            shard.shrink_to_fit();
        }
        live
    }

    /// Counts the bytes that have moved since they were last counted.
    pub(super) fn count_bytes(&self) {
        for shard in &self.shards {
            lock(shard).values_mut().for_each(Live::count_bytes);
        }
    }

    pub(super) fn connections(&self) -> Vec<Arc<Connection>> {
        let mut all = Vec::with_capacity(self.len());
        for shard in &self.shards {
            all.extend(lock(shard).values().map(|live| Arc::clone(&live.connection)));
        }
        all
    }

    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    fn shard(&self, id: u64) -> MutexGuard<'_, Shard> {
        lock(&self.shards[id as usize % SHARDS])
    }
}

/// A panic elsewhere does not make the table wrong.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Spreads ids that this process has given out itself; nobody else can choose them.
#[derive(Default)]
struct SequenceHasher(u64);

impl Hasher for SequenceHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        // Fibonacci hashing: the table takes its control bits from the top, its index from the bottom.
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_connection_takes_40_bytes_of_the_table() {
        assert!(size_of::<(u64, Live)>() <= 40);
    }

    #[test]
    fn ids_in_sequence_spread_over_both_ends_of_the_hash() {
        let hash = |id: u64| {
            let mut hasher = SequenceHasher::default();
            hasher.write_u64(id);
            hasher.finish()
        };
        // As in one shard: every sixteenth id.
        let distinct = |bits: fn(u64) -> u64| {
            (0..1024)
                .map(|n| bits(hash(n * SHARDS as u64)))
                .collect::<std::collections::HashSet<_>>()
                .len()
        };
        assert!(distinct(|hash| hash >> 57) > 100);
        assert!(distinct(|hash| hash & 1023) > 500);
    }
}
