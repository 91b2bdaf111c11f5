"""The parts of the index_kl kernel on GPUs with wgmma: memory, producers, consumers and their arithmetic."""
