{% if launch.needs_host %}
: "${SERVER_HOST:?the name of the machine of the servers}"
{% endif %}
{% if expands %}
export PYTORCH_ALLOC_CONF=expandable_segments:True
{% endif %}
{% if train.device.is_cpu and train.count > 1 %}
export ACCELERATE_USE_CPU=true
{% endif %}
{% if launch.shares_machine %}
export CUDA_VISIBLE_DEVICES=$(seq -s, 0 {{ train.count - 1 }})
{% endif %}
