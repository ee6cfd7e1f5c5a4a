//! Recorded decode steps.
//!
//! A decode step enqueues some hundred kernels that each run for microseconds. A graph of the
//! device starts them with one call. Its sizes and addresses are fixed, so a graph serves steps of
//! one shape. Tables are padded to few shapes, and their content changes from step to step.
//!
//! Invariant: a graph is replayed only while its addresses are those of the present memory. It
//! keeps its memory allocated, so no other memory can have them.

use larder_kernels::device::{DeviceError, Graph, Stream};
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of graphs that are kept.
const GRAPHS_MAX: usize = 64;

/// Padded sizes of a decode step: rows, spans of attention, and entries of the page table.
pub(super) type StepShape = [usize; 3];

#[derive(Default)]
pub(super) struct Graphs {
    /// Addresses that all graphs use.
    addresses: Vec<u64>,
    by_shape: HashMap<StepShape, Arc<dyn Graph>>,
}

impl Graphs {
    /// Drops all graphs. Call it before their memory is replaced.
    pub(super) fn clear(&mut self) {
        self.by_shape.clear();
    }

    /// Returns the graph of a shape. If there is none for these addresses, `enqueue` enqueues its
    /// operations on `stream`, which records them.
    ///
    /// # Errors
    /// Those of `enqueue`, or if the device cannot build the graph.
    pub(super) fn get(
        &mut self,
        stream: &dyn Stream,
        addresses: &[u64],
        shape: StepShape,
        enqueue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Arc<dyn Graph>, DeviceError> {
        if self.addresses != addresses {
            self.clear();
            self.addresses = addresses.to_vec();
        }
        if let Some(graph) = self.by_shape.get(&shape) {
            return Ok(Arc::clone(graph));
        }
        stream.begin_graph()?;
        let enqueued = enqueue();
        // Before an error leaves, so that the stream does not go on to record.
        let graph = stream.end_graph();
        enqueued?;
        let graph = graph?;
        if self.by_shape.len() >= GRAPHS_MAX {
            self.clear();
        }
        self.by_shape.insert(shape, Arc::clone(&graph));
        Ok(graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_kernels::device::{Place, host};

    #[test]
    fn graphs_are_recorded_once_per_shape_and_set_of_addresses() {
        let device = host::open(1 << 20);
        let stream = device.stream("test").unwrap();
        let memory = device.allocate(Place::Pinned, 16).unwrap();
        let mut graphs = Graphs::default();
        let mut recorded = 0;
        let mut get = |address: u64, shape: StepShape| {
            let enqueue = || {
                recorded += 1;
                stream.fill(&memory.all(), 7)
            };
            graphs.get(&*stream, &[address], shape, enqueue).unwrap().operations()
        };
        for (address, shape) in [(1, [1, 1, 1]), (1, [1, 1, 1]), (1, [2, 1, 1]), (1, [1, 1, 1])] {
            assert_eq!(get(address, shape), 1);
        }
        // Other addresses, and then the old ones again.
        for address in [2, 1] {
            assert_eq!(get(address, [1, 1, 1]), 1);
        }
        assert_eq!(recorded, 4);
        let failed = graphs.get(&*stream, &[1], [9, 9, 9], || Err(DeviceError::NotHostMemory));
        assert!(matches!(failed, Err(DeviceError::NotHostMemory)));
        // The stream records no longer.
        assert!(stream.record().is_ok());
    }
}
