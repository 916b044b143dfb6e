"""Named settings that lay out a model on eight devices.

Chapters: 12, 13, 18.
"""

# Every kind of parallelism, and combinations. The tests prove each equal to one device, and the book draws them.
LAYOUTS = {
    "dp": "sharding.rules=dp mesh.data=8",
    "fsdp": "sharding.rules=fsdp mesh.fsdp=8",
    "zero1": "sharding.rules=zero1 mesh.fsdp=8",
    "zero2": "sharding.rules=zero2 mesh.fsdp=8 train.microbatches=2",
    "tp": "sharding.rules=tp mesh.tensor=4 mesh.data=2",
    "tp_seq": "sharding.rules=tp_seq mesh.tensor=4 mesh.data=2",
    "fsdp x tp": "sharding.rules=fsdp_tp mesh.fsdp=4 mesh.tensor=2",
    "cp, ring": "sharding.rules=cp mesh.context=8",
    "cp, all-gather": "sharding.rules=cp mesh.context=8 model.attention.context=allgather",
    "cp x fsdp": "sharding.rules=cp mesh.context=2 mesh.fsdp=4 model.remat=full",
    "ep as dp": "sharding.rules=ep mesh.expert=4 mesh.fsdp=2",
    "pp, gpipe": "sharding.rules=pp mesh.stage=4 mesh.data=2 pipeline.schedule=gpipe",
    "pp, 1f1b": "sharding.rules=pp mesh.stage=4 mesh.fsdp=2 pipeline.schedule=1f1b",
    "pp, circular": "sharding.rules=pp mesh.stage=2 mesh.fsdp=2 mesh.tensor=2 pipeline.schedule=circular",
    "fsdp x tp x cp": "mesh.fsdp=2 mesh.tensor=2 mesh.context=2",
    "fsdp x tp x pp": "mesh.fsdp=2 mesh.tensor=2 mesh.stage=2 train.loss_chunks=2",
    "dp x tp x cp, bare": "mesh.data=2 mesh.tensor=2 mesh.context=2 model.tie_embeddings=true model.scan_layers=false",
}

# The same for a mixture of experts, in a separate table because it's another model.
EXPERT_LAYOUTS = {
    "ep": "sharding.rules=ep mesh.expert=8",
    "ep x fsdp": "sharding.rules=ep mesh.expert=4 mesh.fsdp=2",
    "ep x tp": "mesh.expert=4 mesh.tensor=2",
    "ep x fsdp x tp": "mesh.expert=2 mesh.fsdp=2 mesh.tensor=2",
    "ep x fsdp, remat": "mesh.expert=2 mesh.fsdp=4 model.remat=full",
    "ep x dp x tp, capacity": "mesh.expert=2 mesh.data=2 mesh.tensor=2 model.ffn.capacity_factor=1.0",
    "ep x cp, more experts": "mesh.expert=2 mesh.context=2 mesh.data=2 model.ffn.experts_per_token=3",
    "fsdp": "mesh.fsdp=8 model.ffn.shared_experts=1 model.ffn.bias_rate=0.01",
}
