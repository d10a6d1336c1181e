//! Fragmentation device by device: where the room lies that requests cannot use.

use super::super::fit::Room;
use super::super::mix::CompiledMix;
use super::super::node::{ClaimRule, NodeLedger};
use super::super::units::Share;
use super::{Uses, Weighted, fits, is_counted};

/// For each GPU of `node` that can be shared and is well, by its position on the node: the free share
/// that typical requests cannot use, in the mean over the mix and rounded down. Before rounding the
/// sum over the devices is the node's fragmentation. Zero without a mix. O(requests × devices).
///
/// # Panics
/// Never: what is stranded of a device is at most its free share.
pub fn stranded_by_device(node: &NodeLedger, mix: &CompiledMix) -> Vec<(usize, Share)> {
    let mix = &mix.typical;
    let rooms = node.rooms(ClaimRule::Ignored);
    let uses = Uses::of(mix, rooms);
    let cpu = node.host_room(ClaimRule::Ignored).cpu;
    let rows = mix.rows.iter().zip(&uses.per_row);
    let runnable: Vec<_> = rows
        .filter(|(row, seen)| seen.fitting >= row.count)
        .map(|(row, _)| (row, row.weight_within(cpu)))
        .collect();
    let stranded = |room: &Room| {
        let users = runnable
            .iter()
            .filter(|(row, _)| fits(row.demand.of(room.class).as_ref(), room.free))
            .map(|(_, weight)| weight);
        let others =
            Weighted::from(mix.total) - users.copied().map(Weighted::from).sum::<Weighted>();
        let part = Weighted::from(room.free.share.millionths()) * others;
        let millionths = part / Weighted::from(mix.total.max(1));
        Share::from_millionths(u64::try_from(millionths).expect("at most the free share"))
    };
    let counted = rooms.iter().enumerate().filter(|(_, room)| is_counted(mix, room));
    counted.map(|(at, room)| (at, stranded(room))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::fixture;
    use super::super::Packing;
    use super::*;

    fn check(node: &str, mix: &str, expected: &[u64]) {
        let (node, classes) = fixture::node(node);
        let mix = fixture::compiled(mix, &node, &classes);
        let found = stranded_by_device(&node, &mix);
        let millionths: Vec<u64> = found.iter().map(|(_, share)| share.millionths()).collect();
        assert_eq!(millionths, expected);
        let sum: u64 = millionths.iter().sum();
        assert_eq!(sum, Packing::of(&node, &mix).fragmented_share().millionths());
    }

    #[test]
    fn devices_share_the_fragmentation_of_their_node() {
        let node = "A:500/1000 B:200/1000";
        check(node, "1 fraction=0.3", &[0, 200_000]);
        check(node, "1 fraction=0.2 count=2", &[0, 0]);
        check(node, "1 whole", &[500_000, 200_000]);
        // A: nobody for the whole GPU and the CPU pod, 3 of 10; B: the same and 0.3 and 0.5, 10 of 10.
        check(node, "4 fraction=0.3; 3 fraction=0.5; 2 whole; 1 cpu=1000", &[150_000, 200_000]);
        check(node, "", &[0, 0]);
        check("A:500/1000 B!:1000/1000", "1 whole", &[500_000]);
    }
}
